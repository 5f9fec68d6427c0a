//! Compares the layouts with the system's headers.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use super::*;
use test_support::skip;

/// Checks of one structure: its name in C, our type, and pairs of C field and our field.
macro_rules! layouts {
    ($($c:literal $rust:ident { $($cf:literal $rf:ident),* $(,)? })*) => {
        vec![$(
            (concat!("sizeof(", $c, ")"), size_of::<$rust>()),
            $((concat!("offsetof(", $c, ", ", $cf, ")"), offset_of!($rust, $rf)),)*
        )*]
    };
}

#[test]
fn layouts_are_those_of_the_headers() {
    let layouts = layouts! {
        "struct fi_tx_attr" TxAttr { "msg_order" msg_order, "inject_size" inject_size, "size" size, "tclass" tclass }
        "struct fi_rx_attr" RxAttr { "msg_order" msg_order, "size" size, "iov_limit" iov_limit }
        "struct fi_ep_attr" EpAttr { "type" kind, "max_msg_size" max_msg_size, "mem_tag_format" mem_tag_format, "auth_key" auth_key }
        "struct fi_domain_attr" DomainAttr { "name" name, "threading" threading, "resource_mgmt" resource_mgmt, "av_type" av_type, "mr_mode" mr_mode, "mr_key_size" mr_key_size, "cq_data_size" cq_data_size, "caps" caps, "tclass" tclass }
        "struct fi_fabric_attr" FabricAttr { "name" name, "prov_name" prov_name, "api_version" api_version }
        "struct fi_info" FiInfo { "caps" caps, "mode" mode, "addr_format" addr_format, "src_addrlen" src_addrlen, "src_addr" src_addr, "tx_attr" tx_attr, "rx_attr" rx_attr, "ep_attr" ep_attr, "domain_attr" domain_attr, "fabric_attr" fabric_attr, "nic" nic }
        "struct fid" Fid { "fclass" fclass, "ops" ops }
        "struct fi_ops" Ops { "close" close, "bind" bind, "control" control, "ops_set" ops_set }
        "struct fid_fabric" FidFabric { "ops" ops, "api_version" api_version }
        "struct fi_ops_fabric" OpsFabric { "domain" domain, "trywait" trywait, "domain2" domain2 }
        "struct fid_domain" FidDomain { "ops" ops, "mr" mr }
        "struct fi_ops_domain" OpsDomain { "av_open" av_open, "cq_open" cq_open, "endpoint" endpoint, "endpoint2" endpoint2 }
        "struct fi_ops_mr" OpsMr { "reg" reg, "regattr" regattr }
        "struct fi_mr_attr" MrAttr { "mr_iov" iov, "iov_count" iov_count, "access" access, "requested_key" requested_key, "auth_key" auth_key, "iface" iface, "device" device }
        "struct fid_mr" FidMr { "mem_desc" mem_desc, "key" key }
        "struct fi_av_attr" AvAttr { "type" kind, "count" count, "flags" flags }
        "struct fid_av" FidAv { "ops" ops }
        "struct fi_ops_av" OpsAv { "insert" insert, "remove" remove, "av_set" av_set }
        "struct fi_cq_attr" CqAttr { "size" size, "format" format, "wait_obj" wait_obj, "wait_cond" wait_cond, "wait_set" wait_set }
        "struct fi_cq_data_entry" CqDataEntry { "op_context" op_context, "flags" flags, "len" len, "data" data }
        "struct fi_cq_err_entry" CqErrEntry { "op_context" op_context, "flags" flags, "data" data, "err" err, "prov_errno" prov_errno, "err_data_size" err_data_size }
        "struct fid_cq" FidCq { "ops" ops }
        "struct fi_ops_cq" OpsCq { "read" read, "readfrom" readfrom, "readerr" readerr, "strerror" strerror }
        "struct fid_ep" FidEp { "cm" cm, "msg" msg, "rma" rma, "collective" collective }
        "struct fi_ops_cm" OpsCm { "getname" getname, "join" join }
        "struct fi_ops_msg" OpsMsg { "recv" recv, "send" send, "inject" inject, "injectdata" injectdata }
        "struct fi_ops_rma" OpsRma { "read" read, "write" write, "writemsg" writemsg, "injectdata" injectdata }
        "struct fi_rma_iov" RmaIov { "addr" addr, "len" len, "key" key }
        "struct fi_msg_rma" MsgRma { "msg_iov" iov, "desc" desc, "addr" addr, "rma_iov" rma_iov, "context" context, "data" data }
        "struct iovec" Iovec { "iov_base" base, "iov_len" len }
    };
    let constants = [
        ("FI_MSG", FI_MSG),
        ("FI_RMA", FI_RMA),
        ("FI_READ", FI_READ),
        ("FI_WRITE", FI_WRITE),
        ("FI_RECV", FI_RECV),
        ("FI_TRANSMIT", FI_TRANSMIT),
        ("FI_REMOTE_READ", FI_REMOTE_READ),
        ("FI_REMOTE_WRITE", FI_REMOTE_WRITE),
        ("FI_REMOTE_CQ_DATA", FI_REMOTE_CQ_DATA),
        ("FI_COMPLETION", FI_COMPLETION),
        ("FI_DELIVERY_COMPLETE", FI_DELIVERY_COMPLETE),
        ("FI_SOURCE", FI_SOURCE),
        ("FI_CONTEXT", FI_CONTEXT),
        ("FI_CONTEXT2", FI_CONTEXT2),
        ("FI_ORDER_SAS", FI_ORDER_SAS),
        ("FI_MR_LOCAL", FI_MR_LOCAL as u64),
        ("FI_MR_VIRT_ADDR", FI_MR_VIRT_ADDR as u64),
        ("FI_MR_ALLOCATED", FI_MR_ALLOCATED as u64),
        ("FI_MR_PROV_KEY", FI_MR_PROV_KEY as u64),
        ("FI_MR_ENDPOINT", FI_MR_ENDPOINT as u64),
        ("FI_MR_HMEM", FI_MR_HMEM as u64),
        ("FI_EP_RDM", FI_EP_RDM.into()),
        ("FI_THREAD_SAFE", FI_THREAD_SAFE.into()),
        ("FI_RM_ENABLED", FI_RM_ENABLED.into()),
        ("FI_AV_TABLE", FI_AV_TABLE.into()),
        ("FI_SOCKADDR", FI_SOCKADDR.into()),
        ("FI_SOCKADDR_IN", FI_SOCKADDR_IN.into()),
        ("FI_SOCKADDR_IN6", FI_SOCKADDR_IN6.into()),
        ("FI_CQ_FORMAT_DATA", FI_CQ_FORMAT_DATA.into()),
        ("FI_WAIT_NONE", FI_WAIT_NONE.into()),
        ("FI_WAIT_FD", FI_WAIT_FD.into()),
        ("FI_HMEM_SYSTEM", FI_HMEM_SYSTEM.into()),
        ("FI_ADDR_UNSPEC", FI_ADDR_UNSPEC),
        ("FI_GETWAIT", FI_GETWAIT as u64),
        ("FI_ENABLE", FI_ENABLE as u64),
        ("FI_EAGAIN", FI_EAGAIN as u64),
        ("FI_ENOMEM", FI_ENOMEM as u64),
        ("FI_EBUSY", FI_EBUSY as u64),
        ("FI_ENODATA", FI_ENODATA as u64),
        ("FI_EAVAIL", FI_EAVAIL as u64),
        ("FI_ENOKEY", FI_ENOKEY as u64),
    ];
    let expected = layouts
        .into_iter()
        .map(|(name, value)| (name, value as u64))
        .chain(constants)
        .collect::<Vec<_>>();
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <sys/uio.h>\n#include <rdma/fabric.h>\n\
         #include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n#include <rdma/fi_cm.h>\n\
         #include <rdma/fi_rma.h>\n#include <rdma/fi_errno.h>\nint main(void) {\n",
    );
    for (name, _) in &expected {
        writeln!(program, "printf(\"%llu\\n\", (unsigned long long)({name}));").unwrap();
    }
    program.push_str("return 0;\n}\n");
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layouts.c"), folder.path().join("layouts"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&binary).output();
    let complaint = match &compiled {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(complaint) = complaint {
        let is_header_missing = complaint.contains("rdma/fabric.h");
        assert!(is_header_missing || compiled.is_err(), "{complaint}");
        skip("libfabric", "needs cc and libfabric's headers (Debian: libfabric-dev)");
        return;
    }
    let output = Command::new(&binary).output().unwrap();
    let found: Vec<u64> =
        String::from_utf8(output.stdout).unwrap().lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    for ((name, ours), theirs) in expected.into_iter().zip(found) {
        assert_eq!(ours, theirs, "{name}");
    }
}
