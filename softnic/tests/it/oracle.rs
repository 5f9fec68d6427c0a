//! Requests and completions, byte for byte: the device functions, the Rust encoder and the vendor's
//! header (Debian's `infiniband/mlx5dv.h`) over random fields.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::common::{driver, fresh_seed};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use softnic_driver::{Fields, Immediate, Kind};
use switchyard_softnic::abi::ReceiveHandle;
use switchyard_softnic::format::{
    Atomic, Cqe, CqeKind, Local, Operation, Remote, Source, Syndrome, Wqe, decode_doorbell,
    doorbell_word, empty_receive, opcode,
};

/// Requests per kind. `SWITCHYARD_ORACLE_CASES` asks for more.
const NUM_CASES: usize = 2000;

/// `SY_MLX5_DBREC_SEND` of the kernels' headers.
const DBREC_SEND: usize = 1;

/// Answers of the vendor's header. `None`, noted, where it is not installed.
fn ask(questions: &[String]) -> Option<Vec<String>> {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("oracle");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/mlx5_oracle.c");
    let header = Command::new("cc")
        .args(["-E", "-include", "infiniband/mlx5dv.h", "-x", "c", "/dev/null"])
        .output();
    if !header.is_ok_and(|output| output.status.success()) {
        test_support::skip(
            "mlx5dv",
            "infiniband/mlx5dv.h is missing: install Debian's libibverbs-dev",
        );
        return None;
    }
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-o"])
        .arg(&program)
        .arg(source)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "the oracle does not compile:\n{errors}");
    let mut child =
        Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input: Arc<str> = questions.join("\n").into();
    let writer = std::thread::spawn(move || {
        stdin.write_all(input.as_bytes()).and_then(|()| stdin.write_all(b"\n"))
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    let answers: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), questions.len());
    Some(answers)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A number with edge cases: zeros, ones, single bits.
fn any(rng: &mut SmallRng) -> u64 {
    match rng.random_range(0..8) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << rng.random_range(0..64),
        _ => rng.next_u64(),
    }
}

fn random_fields(rng: &mut SmallRng, kind: Kind) -> (Fields, [u8; 28]) {
    let mut bytes = [0; 28];
    rng.fill_bytes(&mut bytes);
    let num_bytes = match kind {
        Kind::WriteInline => [4, 8][rng.random_range(0..2)],
        Kind::WriteInlineBytes => rng.random_range(1..=28),
        Kind::WriteInlineWords => 8 * rng.random_range(1..=3),
        Kind::WriteImm if rng.random_ratio(1, 4) => 0,
        _ => any(rng) as u32 & 0x7fff_ffff,
    };
    let flags = [0x00, 0x08, 0x0a, 0x0c, 0x28, 0x48, 0x68, 0x88, 0xe8];
    let fields = Fields {
        qpn: any(rng) as u32 & 0xff_ffff,
        index: any(rng) as u32 & 0xffff,
        flags: flags[rng.random_range(0..flags.len())],
        lkey: any(rng) as u32,
        local: any(rng),
        remote: any(rng),
        rkey: any(rng) as u32,
        num_bytes,
        value: any(rng),
        boundary: any(rng),
    };
    if kind == Kind::WriteInlineWords {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&fields.value.to_le_bytes());
        }
    }
    (fields, bytes)
}

/// The same request for the Rust encoder.
fn in_rust(kind: Kind, fields: &Fields, bytes: &[u8; 28]) -> Wqe {
    let local = |num_bytes| Local { address: fields.local, lkey: fields.lkey, num_bytes };
    let whole = local(fields.num_bytes);
    let remote = Remote { address: fields.remote, rkey: fields.rkey };
    let gather = |has_bytes: bool| Source::Gather(if has_bytes { vec![whole] } else { vec![] });
    let num_bytes = fields.num_bytes as usize;
    let operation = match kind {
        Kind::Nop => Operation::Nop,
        Kind::Dump => Operation::Dump(whole),
        Kind::Write => Operation::Write(remote, gather(true)),
        Kind::WriteInline => {
            let value = fields.value.to_le_bytes()[..num_bytes].to_vec();
            Operation::Write(remote, Source::Inline(value))
        }
        Kind::WriteInlineBytes | Kind::WriteInlineWords => {
            Operation::Write(remote, Source::Inline(bytes[..num_bytes].to_vec()))
        }
        Kind::WriteImm => Operation::WriteImm(remote, gather(num_bytes != 0), fields.value as u32),
        Kind::Read => Operation::Read(remote, vec![whole]),
        Kind::FetchAdd => Operation::Atomic(remote, Atomic::Add8(fields.value), local(8)),
        Kind::MaskedFetchAdd4 => {
            let add = Atomic::MaskedAdd4(fields.value as u32, fields.boundary as u32);
            Operation::Atomic(remote, add, local(4))
        }
        Kind::MaskedFetchAdd8 => {
            let add = Atomic::MaskedAdd8(fields.value, fields.boundary);
            Operation::Atomic(remote, add, local(8))
        }
    };
    let (qpn, index, flags) = (fields.qpn, fields.index as u16, fields.flags as u8);
    Wqe { qpn, index, flags, operation }
}

/// 64 bytes with the alignment that a block has.
#[repr(C, align(64))]
struct Block([u8; 64]);

#[test]
fn requests_are_what_the_vendor_makes_of_them() {
    let Some(driver) = driver("product") else { return };
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let num_cases = std::env::var("SWITCHYARD_ORACLE_CASES")
        .ok()
        .and_then(|num| num.parse().ok())
        .unwrap_or(NUM_CASES);
    let mut questions = Vec::new();
    let mut cases = Vec::new();
    for kind in Kind::ALL {
        for _ in 0..num_cases {
            let (f, bytes) = random_fields(&mut rng, kind);
            questions.push(format!(
                "wqe {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {:x} {}",
                kind as u32,
                f.qpn,
                f.index,
                f.flags,
                f.lkey,
                f.local,
                f.remote,
                f.rkey,
                f.num_bytes,
                f.value,
                f.boundary,
                hex(&bytes)
            ));
            // The block is full of something else before.
            let mut block = Block([0xa5; 64]);
            // SAFETY: fields, bytes and block are valid and long enough.
            unsafe { (driver.build)(kind as u32, &f, bytes.as_ptr(), block.0.as_mut_ptr()) };
            let wqe = in_rust(kind, &f, &bytes);
            let encoded = wqe.encode();
            assert_eq!(encoded.len(), 64);
            let num_used = (block.0[7] & 0x3f) as usize * 16;
            assert_eq!(hex(&encoded[..num_used]), hex(&block.0[..num_used]), "{kind:?} {f:?}");
            assert!(block.0[num_used..].iter().all(|byte| *byte == 0xa5), "{kind:?}: too much");
            assert_eq!(Wqe::decode(&block.0[..num_used]).as_ref(), Ok(&wqe), "{kind:?} {f:?}");
            cases.push((kind, f, num_used, block.0));
        }
    }
    let Some(answers) = ask(&questions) else { return };
    for ((kind, fields, num_used, block), answer) in cases.iter().zip(answers) {
        assert_eq!(hex(&block[..*num_used]), answer[..num_used * 2], "{kind:?} {fields:?}");
        // Fields that the vendor leaves unused must be zero.
        assert!(answer[num_used * 2..].bytes().all(|digit| digit == b'0'));
    }
    println!("{} requests agree", cases.len());
}

#[test]
fn completions_are_read_as_the_vendor_reads_them() {
    let Some(driver) = driver("product") else { return };
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let mut questions = Vec::new();
    let mut cases = Vec::new();
    for _ in 0..NUM_CASES {
        let status = match rng.random_range(0..3) {
            0 => Ok(CqeKind::Request),
            1 => Ok(CqeKind::WriteImm(any(&mut rng) as u32)),
            _ => Err(Syndrome::ALL[rng.random_range(0..Syndrome::ALL.len())]),
        };
        let cqe = Cqe {
            status,
            qpn: any(&mut rng) as u32 & 0xff_ffff,
            opcode: any(&mut rng) as u8,
            counter: any(&mut rng) as u16,
            num_bytes: if status.is_ok() { any(&mut rng) as u32 } else { 0 },
            is_receive: match status {
                Ok(kind) => kind != CqeKind::Request,
                Err(_) => rng.random(),
            },
        };
        let owner = rng.random();
        let block = Block(cqe.encode(owner));
        assert_eq!(Cqe::decode(&block.0), Some((cqe, owner)));
        questions.push(format!("cqe {}", hex(&block.0)));
        let mut fields = [0; 4];
        // SAFETY: 64 aligned bytes, four numbers.
        unsafe { (driver.decode_cqe)(block.0.as_ptr(), &mut fields) };
        cases.push((cqe, owner, fields));
    }
    let Some(answers) = ask(&questions) else { return };
    for ((cqe, owner, fields), answer) in cases.iter().zip(answers) {
        let (opcode, imm, syndrome) = match cqe.status {
            Ok(CqeKind::Request) => (0, 0, 0),
            Ok(CqeKind::WriteImm(imm)) => (1, imm, 0),
            Err(syndrome) => (if cqe.is_receive { 14 } else { 13 }, 0, syndrome as u8),
        };
        let expected = format!(
            "{opcode:x} {:x} {:x} {:x} {:x} {imm:x} {:x} {syndrome:x} 0",
            u8::from(*owner),
            cqe.qpn,
            cqe.opcode,
            cqe.counter,
            cqe.num_bytes
        );
        assert_eq!(answer, expected, "{cqe:?}");
        let found = (fields[0], fields[1], fields[2]);
        assert_eq!(found, (opcode, u64::from(*owner), u64::from(cqe.counter)));
        if let Err(syndrome) = cqe.status {
            let word = 3
                | (syndrome as u64) << 8
                | u64::from(cqe.opcode) << 24
                | u64::from(cqe.counter) << 32;
            assert_eq!(fields[3], word);
        }
    }
}

#[test]
fn a_receive_is_the_segment_that_ends_the_vendors_lists() {
    let Some(answers) = ask(&["receive".to_owned()]) else { return };
    assert_eq!(answers, [hex(&empty_receive())]);
}

/// The reader of immediate data decodes a completion as the vendor's header does.
#[test]
fn immediate_data_is_what_the_vendor_reads() {
    let Some(driver) = driver("product") else { return };
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let mut questions = Vec::new();
    let mut cases = Vec::new();
    for case in 0..NUM_CASES {
        let kind = case % 3;
        let qpn = rng.random_range(1..1 << 24);
        let (number, cq_index) = (any(&mut rng) >> 8, any(&mut rng) >> 8);
        let status = match kind {
            0 => Err(Syndrome::ALL[rng.random_range(0..Syndrome::ALL.len())]),
            _ => Ok(CqeKind::WriteImm(any(&mut rng) as u32)),
        };
        let (counter, num_bytes) = (number as u16, any(&mut rng) as u32);
        let num_bytes = if status.is_ok() { num_bytes } else { 0 };
        let cqe = Cqe { status, qpn, opcode: 0, counter, num_bytes, is_receive: true };
        // A ring of one entry: its owner bit is the number's lowest. Every third one is of the round before.
        let owner = (cq_index & 1 == 1) != (kind == 2);
        let block = Block(cqe.encode(owner));
        questions.push(format!("cqe {}", hex(&block.0)));
        let mut records = [0_u64; 2];
        let mut state = [0_u64; 16];
        (state[0], state[1]) = (cq_index, number);
        let address = |word: &mut u64| std::ptr::from_mut(word).expose_provenance() as u64;
        let handle = ReceiveHandle {
            dbrec: address(&mut records[0]),
            cq: block.0.as_ptr().expose_provenance() as u64,
            cq_dbrec: address(&mut records[1]),
            state: state.as_mut_ptr().expose_provenance() as u64,
            qpn,
            cq_depth: 1,
            num_receives: 1,
            peer: 0,
        };
        let mut taken = Immediate::default();
        // SAFETY: everything that the handle names lives here.
        let found =
            unsafe { (driver.try_receive)(std::ptr::from_ref(&handle).cast(), &raw mut taken) };
        // SAFETY: as they are now.
        let error = unsafe { state.as_ptr().add(3).read_volatile() };
        cases.push((kind, found == 1, taken, error));
    }
    let Some(answers) = ask(&questions) else { return };
    for ((kind, has_any, taken, error), answer) in cases.iter().zip(answers) {
        let fields: Vec<u64> =
            answer.split(' ').map(|field| u64::from_str_radix(field, 16).unwrap()).collect();
        let [opcode, _, qpn, _, counter, imm, num_bytes, syndrome, _] = fields[..] else {
            panic!("{answer}")
        };
        match kind {
            0 => {
                assert_eq!((opcode, *has_any), (14, false), "{answer}");
                assert_eq!(*error, 3 | syndrome << 8 | counter << 32, "{answer}");
            }
            1 => {
                let found = [taken.qpn, taken.imm, taken.num_bytes].map(u64::from);
                assert_eq!((*has_any, found), (true, [qpn, imm, num_bytes]), "{answer}");
            }
            _ => assert_eq!((*has_any, *error), (false, 0), "{answer}"),
        }
    }
}

#[test]
fn doorbells_follow_the_vendors_control_segment() {
    let Some(driver) = driver("product") else { return };
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let (mut questions, mut found) = (Vec::new(), Vec::new());
    for _ in 0..NUM_CASES {
        let (qpn, end) = (any(&mut rng) as u32 & 0xff_ffff, any(&mut rng));
        // SAFETY: numbers in, numbers out.
        let (word, record) = unsafe { ((driver.doorbell)(qpn, end), (driver.dbrec)(end)) };
        assert_eq!(word, doorbell_word(qpn, end));
        assert_eq!(decode_doorbell(word), (qpn, end as u16));
        assert_eq!(record.to_ne_bytes(), [0, 0, (end >> 8) as u8, end as u8]);
        // Another spelling is the head of the last request: same place, same meaning.
        let index = (end as u16).wrapping_sub(1);
        let wqe = Wqe { qpn, index, flags: 8, operation: Operation::Nop };
        let head: [u8; 8] = wqe.encode()[..8].try_into().unwrap();
        assert_eq!(decode_doorbell(u64::from_ne_bytes(head)), (qpn, end as u16));
        let mut records = [0; 2];
        records[DBREC_SEND] = record;
        found.push(format!(
            "{} {}",
            hex(&word.to_ne_bytes()),
            hex(&records.map(u32::to_ne_bytes).concat())
        ));
        questions.push(format!("doorbell {qpn:x} {:x}", end & 0xffff));
    }
    let Some(answers) = ask(&questions) else { return };
    for ((question, found), answer) in questions.iter().zip(found).zip(answers) {
        assert_eq!(found, answer, "{question}");
    }
}

#[test]
fn counters_are_rebuilt_as_long_as_they_can_be() {
    let Some(driver) = driver("product") else { return };
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    for _ in 0..100_000 {
        let known = any(&mut rng) >> 1;
        let true_count = known + rng.random_range(0..=40_000u64);
        // SAFETY: numbers in, numbers out.
        let rebuilt =
            |counter: u64| unsafe { (driver.completed_after)(known, counter as u32 & 0xffff) };
        assert_eq!(rebuilt(true_count.wrapping_sub(1)), true_count);
        // Further ahead it is too small and never too large.
        let far = known + rng.random_range(65_536..1 << 40);
        let found = rebuilt(far - 1);
        assert!(found <= far && found >= known && (far - found).is_multiple_of(65_536));
    }
}

#[test]
fn constants_are_the_vendors() {
    let expected: Vec<(&str, u32)> = vec![
        ("MLX5_OPCODE_NOP", opcode::NOP.into()),
        ("MLX5_OPCODE_RDMA_WRITE", opcode::WRITE.into()),
        ("MLX5_OPCODE_RDMA_WRITE_IMM", opcode::WRITE_IMM.into()),
        ("MLX5_OPCODE_RDMA_READ", opcode::READ.into()),
        ("MLX5_OPCODE_ATOMIC_CS", opcode::ATOMIC_CS.into()),
        ("MLX5_OPCODE_ATOMIC_FA", opcode::ATOMIC_FA.into()),
        ("MLX5_OPCODE_ATOMIC_MASKED_CS", opcode::MASKED_CS.into()),
        ("MLX5_OPCODE_ATOMIC_MASKED_FA", opcode::MASKED_FA.into()),
        ("MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR", Syndrome::LocalLength as u32),
        ("MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR", Syndrome::LocalQpOp as u32),
        ("MLX5_CQE_SYNDROME_LOCAL_PROT_ERR", Syndrome::LocalProtection as u32),
        ("MLX5_CQE_SYNDROME_WR_FLUSH_ERR", Syndrome::Flushed as u32),
        ("MLX5_CQE_SYNDROME_MW_BIND_ERR", Syndrome::MemoryWindowBind as u32),
        ("MLX5_CQE_SYNDROME_BAD_RESP_ERR", Syndrome::BadResponse as u32),
        ("MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR", Syndrome::LocalAccess as u32),
        ("MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR", Syndrome::RemoteInvalid as u32),
        ("MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR", Syndrome::RemoteAccess as u32),
        ("MLX5_CQE_SYNDROME_REMOTE_OP_ERR", Syndrome::RemoteOp as u32),
        ("MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR", Syndrome::RetryExceeded as u32),
        ("MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR", Syndrome::RnrExceeded as u32),
        ("MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR", Syndrome::RemoteAborted as u32),
        ("MLX5_SND_DBR", 1),
        ("MLX5_RCV_DBR", 0),
        ("MLX5_SEND_WQE_BB", switchyard_softnic::format::BLOCK_BYTES as u32),
        ("MLX5_WQE_CTRL_CQ_UPDATE", switchyard_softnic::format::CE_ALWAYS.into()),
        // As `receive.h` and `cqe.h` have them.
        ("MLX5_CQE_RESP_WR_IMM", 0x1),
        ("MLX5_CQE_RESP_ERR", 0xe),
        ("MLX5_CQE_REQ_ERR", 0xd),
    ];
    let questions: Vec<String> = expected.iter().map(|(name, _)| format!("value {name}")).collect();
    let Some(answers) = ask(&questions) else { return };
    for ((name, value), answer) in expected.iter().zip(answers) {
        assert_eq!(answer, format!("{value:x}"), "{name}");
    }
}
