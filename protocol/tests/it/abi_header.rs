//! `abi.h`, compiled by the C and C++ compilers of this machine, agrees with `abi.rs`.

use std::path::Path;

use switchyard_protocol::abi::{self, Entry, ErrorBody, FrameHeader, TokenRange};
use switchyard_protocol::{ErrorCode, WireDtype};
use test_support::c_fields;
use test_support::c_header::check_c_header;

#[test]
fn header_and_rust_agree_field_by_field() {
    let fields = c_fields! {
        FrameHeader as "sy_frame_header": epoch, client_id, sequence, generation, layer, magic,
            version, kind, dtype, response_dtype, flags, num_tokens, num_entries, hidden, frame_idx,
            num_frames, row_stride_bytes, tokens_offset, entries_offset, scales_offset,
            payload_offset, total_bytes, header_crc, payload_crc, server_queue_ns,
            server_compute_ns, reserved;
        TokenRange as "sy_token": entry_begin, entry_count;
        Entry as "sy_entry": expert, weight;
        ErrorBody as "sy_error_body": code, message_len, detail, message;
    };
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/include");
    let values = constants().into_iter().map(|(name, value)| (name.to_owned(), value));
    check_c_header(&include, "switchyard/abi.h", fields, values.collect());
}

/// Every constant of the header with its counterpart.
fn constants() -> Vec<(&'static str, u64)> {
    let mut constants = vec![
        ("SY_FRAME_MAGIC", abi::FRAME_MAGIC.into()),
        ("SY_FRAME_VERSION", abi::FRAME_VERSION.into()),
        ("SY_KIND_DISPATCH", abi::KIND_DISPATCH.into()),
        ("SY_KIND_COMBINE", abi::KIND_COMBINE.into()),
        ("SY_KIND_ERROR", abi::KIND_ERROR.into()),
        ("SY_DTYPE_F32", WireDtype::F32.code().into()),
        ("SY_DTYPE_F16", WireDtype::F16.code().into()),
        ("SY_DTYPE_BF16", WireDtype::Bf16.code().into()),
        ("SY_DTYPE_F8_E4M3", WireDtype::F8E4m3.code().into()),
        ("SY_FLAG_PAYLOAD_CRC", abi::FLAG_PAYLOAD_CRC.into()),
        ("SY_MAX_HIDDEN", abi::MAX_HIDDEN.into()),
    ];
    let sizes = [
        ("SY_SCALE_BLOCK", abi::SCALE_BLOCK),
        ("SY_PAYLOAD_ALIGN", abi::PAYLOAD_ALIGN),
        ("SY_TABLE_ALIGN", abi::TABLE_ALIGN),
        ("SY_ROW_ALIGN", abi::ROW_ALIGN),
        ("SY_MAX_ERROR_MESSAGE", abi::MAX_ERROR_MESSAGE),
        ("SY_CONTROL_BYTES", p2p_core::slot::CONTROL_BYTES),
        ("SY_CONTROL_STRIDE", p2p_core::slot::CONTROL_STRIDE),
        ("SY_WORD_PUBLISHED", p2p_core::slot::PUBLISHED),
        ("SY_WORD_CONSUMED", p2p_core::slot::CONSUMED),
        ("SY_WORD_PROGRESS", p2p_core::slot::PROGRESS),
        ("SY_WORD_WAITING", p2p_core::slot::WAITING),
    ];
    constants.extend(sizes.map(|(name, value)| (name, value as u64)));
    let codes = [
        ("SY_ERROR_BAD_FRAME", ErrorCode::BadFrame),
        ("SY_ERROR_UNKNOWN_EXPERT", ErrorCode::UnknownExpert),
        ("SY_ERROR_WRONG_LAYER", ErrorCode::WrongLayer),
        ("SY_ERROR_NOT_MY_EXPERT", ErrorCode::NotMyExpert),
        ("SY_ERROR_STALE_EPOCH", ErrorCode::StaleEpoch),
        ("SY_ERROR_STALE_CHANNEL", ErrorCode::StaleChannel),
        ("SY_ERROR_OVERLOADED", ErrorCode::Overloaded),
        ("SY_ERROR_SHUTTING_DOWN", ErrorCode::ShuttingDown),
        ("SY_ERROR_INTERNAL", ErrorCode::Internal),
        ("SY_ERROR_VERSION", ErrorCode::Version),
    ];
    constants.extend(codes.map(|(name, code)| (name, code.to_u32().into())));
    constants
}
