//! Every check of a decoder: one wrong field at a time in a frame with valid checksums.

use crate::common::guarded::Guarded;
use crate::common::{Answer, MEMORY_BYTES, Request, fresh_rng, header_of, reseal};
use switchyard_protocol::abi::{ErrorBody, FLAG_PAYLOAD_CRC, FrameHeader, HEADER_BYTES};
use switchyard_protocol::convert::MAX_SCALE;
use switchyard_protocol::{
    DispatchScratch, ErrorCode, FrameError, Response, ResponseScratch, WireDtype, decode_dispatch,
    decode_response, encode_error, peek_id,
};

/// A request of three tokens with two, one and four entries.
fn request(dtype: WireDtype) -> Request {
    let mut request = Request::random(&mut fresh_rng(), 200, dtype, true, 12);
    request.x = vec![1.5; 200 * 3];
    request.tokens = [(0, 0, 2), (1, 2, 1), (2, 3, 4)]
        .map(|(token, entry_begin, entry_count)| switchyard_protocol::TokenRef {
            token,
            entry_begin,
            entry_count,
        })
        .into();
    request.entries = [3, 4, 5, 6, 7, 8, 9]
        .map(|expert| switchyard_protocol::Entry { expert, weight: 0.5 })
        .into();
    request
}

fn refusal(request: &Request, frame: &[u8]) -> FrameError {
    let mut memory = Guarded::new(MEMORY_BYTES);
    let mut scratch = DispatchScratch::for_frames(&request.expect);
    decode_dispatch(memory.hold(frame), &request.expect, &mut scratch).expect_err("must be refused")
}

/// Error for a frame with a changed header.
fn refusal_with(request: &Request, change: impl FnOnce(&mut FrameHeader)) -> FrameError {
    let mut frame = request.frame();
    reseal(&mut frame, change);
    refusal(request, &frame)
}

/// Error for a frame with 4 replaced bytes at `offset`.
fn refusal_at(request: &Request, offset: usize, value: u32) -> FrameError {
    let mut frame = request.frame();
    frame[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    reseal(&mut frame, |_| {});
    refusal(request, &frame)
}

fn names(error: &FrameError) -> &'static str {
    match error {
        FrameError::Field { field, .. } | FrameError::Stale { field, .. } => field,
        FrameError::Section { section, .. } | FrameError::Alignment { section, .. } => section,
        _ => "",
    }
}

#[test]
fn foreign_bytes_are_told_from_frames() {
    let request = request(WireDtype::Bf16);
    let error = refusal_with(&request, |h| h.magic ^= 1);
    assert!(matches!(error, FrameError::Magic { .. }));
    let error = refusal_with(&request, |h| h.version = 2);
    assert!(matches!(error, FrameError::Version { found: 2, expected: 1 }));
    assert_eq!(error.code(), ErrorCode::Version);
    for kind in [0, 2, 3, 4, u16::MAX] {
        let error = refusal_with(&request, |h| h.kind = kind);
        assert!(matches!(error, FrameError::Kind { found, .. } if found == kind));
    }
    let frame = request.frame();
    for len in 0..HEADER_BYTES {
        let error = refusal(&request, &frame[..len]);
        assert_eq!(error, FrameError::TooSmall { found: len, expected: HEADER_BYTES });
        assert_eq!(peek_id(Guarded::new(4096).hold(&frame[..len])), None);
    }
    for len in HEADER_BYTES..frame.len() {
        refusal(&request, &frame[..len]);
    }
}

#[test]
fn counts_and_flags_out_of_range_are_refused_by_name() {
    let request = request(WireDtype::Bf16);
    type Change = fn(&mut FrameHeader);
    let changes: [(&str, Change); 17] = [
        ("num_tokens", |h| h.num_tokens = 0),
        ("num_tokens", |h| h.num_tokens = 13),
        ("num_tokens", |h| h.num_tokens = u32::MAX),
        ("num_entries", |h| h.num_entries = 2),
        ("num_entries", |h| h.num_entries = 13),
        ("num_entries", |h| h.num_entries = u32::MAX),
        ("hidden", |h| h.hidden = 0),
        ("hidden", |h| h.hidden = u32::MAX),
        ("hidden", |h| h.hidden = 199),
        ("flags", |h| h.flags |= 2),
        ("frame_idx", |h| h.frame_idx = h.num_frames),
        ("num_frames", |h| h.num_frames = 0),
        ("dtype", |h| h.dtype = 0),
        ("dtype", |h| h.dtype = 5),
        ("dtype", |h| h.dtype = WireDtype::F16.code()),
        ("response_dtype", |h| h.response_dtype ^= 1),
        ("reserved", |h| h.reserved[3] = 1),
    ];
    for (field, change) in changes {
        let error = refusal_with(&request, change);
        assert_eq!(names(&error), field, "{error}");
        assert_eq!(error.code(), ErrorCode::BadFrame);
    }
    let error = refusal_with(&request, |h| h.flags = 0);
    assert_eq!(names(&error), "payload_crc", "{error}");
    for change in [(|h| h.server_queue_ns = 1) as Change, |h| h.server_compute_ns = 1] {
        assert!(names(&refusal_with(&request, change)).starts_with("server_"));
    }
}

#[test]
fn sections_must_follow_one_another_within_the_frame() {
    let request = request(WireDtype::F8E4m3);
    type Change = fn(&mut FrameHeader);
    let changes: [(&str, Change); 15] = [
        ("tokens", |h| h.tokens_offset = 0),
        ("tokens", |h| h.tokens_offset += 4),
        ("tokens", |h| h.tokens_offset = u32::MAX - 15),
        ("entries", |h| h.entries_offset -= 16),
        ("entries", |h| h.entries_offset += 8),
        ("scales", |h| h.scales_offset -= 16),
        ("scales", |h| h.scales_offset = 0xffff_fff0),
        ("payload", |h| h.payload_offset -= 128),
        ("payload", |h| h.payload_offset += 64),
        ("payload", |h| h.payload_offset += 128),
        ("row_stride_bytes", |h| h.row_stride_bytes = 192),
        ("row_stride_bytes", |h| h.row_stride_bytes = u32::MAX),
        ("row stride", |h| h.row_stride_bytes += 8),
        ("total_bytes", |h| h.total_bytes += 1),
        ("total_bytes", |h| h.total_bytes = u64::MAX),
    ];
    for (section, change) in changes {
        let error = refusal_with(&request, change);
        assert_eq!(names(&error), section, "{error}");
    }
    // Shorter than the rows need.
    let error = refusal_with(&request, |h| h.total_bytes -= 1);
    assert_eq!(names(&error), "payload", "{error}");
}

#[test]
fn tables_must_make_sense() {
    let request = request(WireDtype::F8E4m3);
    let header = header_of(&request.frame());
    let range = |token: usize| header.tokens_offset as usize + token * 8;
    let entry = |entry: usize| header.entries_offset as usize + entry * 8;

    // A gap, an overlap, none, too many, and a sum that wraps.
    for (offset, value, token) in [
        (range(1), 3, 1),
        (range(1), 1, 1),
        (range(1) + 4, 0, 1),
        (range(0) + 4, 5, 0),
        (range(2) + 4, u32::MAX, 2),
        (range(2) + 4, 5, 2),
    ] {
        let error = refusal_at(&request, offset, value);
        let found =
            matches!(error, FrameError::TokenEntries { token: found, .. } if found == token);
        assert!(found, "{error}");
    }
    let error = refusal_at(&request, range(2) + 4, 3);
    assert_eq!(error, FrameError::UnusedEntries { found: 6, expected: 7 });

    for expert in [request.expect.num_experts, u32::MAX] {
        let error = refusal_at(&request, entry(6), expert);
        assert!(matches!(error, FrameError::Expert { entry: 6, .. }), "{error}");
        assert_eq!(error.code(), ErrorCode::UnknownExpert);
    }
    for weight in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = refusal_at(&request, entry(2) + 4, weight.to_bits());
        assert!(matches!(error, FrameError::Weight { entry: 2, .. }), "{error}");
    }
    let scale = header.scales_offset as usize + (2 * 2 + 1) * 4;
    for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, MAX_SCALE.next_up()] {
        let error = refusal_at(&request, scale, bad.to_bits());
        assert!(matches!(error, FrameError::Scale { row: 2, block: 1, .. }), "{error}");
    }
}

#[test]
fn frames_of_another_client_channel_or_layer_are_told_apart() {
    let request = request(WireDtype::F32);
    let error = refusal_with(&request, |h| h.client_id ^= 1);
    assert!(error.is_stale() && names(&error) == "client_id", "{error}");
    let error = refusal_with(&request, |h| h.generation = h.generation.wrapping_sub(1));
    assert!(error.is_stale() && names(&error) == "generation", "{error}");
    assert_eq!(error.code(), ErrorCode::StaleChannel);
    let error = refusal_with(&request, |h| h.layer = 8);
    assert_eq!(error, FrameError::Layer { found: 8, num_layers: 8 });
    assert_eq!(error.code(), ErrorCode::WrongLayer);
}

#[test]
fn changes_without_a_new_checksum_are_noticed() {
    let request = request(WireDtype::F8E4m3);
    let frame = request.frame();
    let header = header_of(&frame);
    for offset in [8, 16, header.entries_offset as usize + 4, header.scales_offset as usize] {
        let mut changed = frame.clone();
        changed[offset] ^= 1;
        assert!(matches!(refusal(&request, &changed), FrameError::HeaderChecksum { .. }));
    }
    let mut memory = Guarded::new(MEMORY_BYTES);
    let mut changed = frame.clone();
    changed[header.payload_offset as usize + 2 * header.row_stride_bytes as usize] ^= 1;
    let mut scratch = DispatchScratch::default();
    let mut dispatch =
        decode_dispatch(memory.hold(&changed), &request.expect, &mut scratch).expect("tables good");
    let mut out = [0f32; 600];
    assert!(dispatch.read_rows_f32(0..2, &mut out[..400]).is_ok());
    let last = dispatch.read_rows_f32(2..3, &mut out[400..]);
    assert!(matches!(last, Err(FrameError::PayloadChecksum { .. })));
}

#[test]
fn responses_to_something_else_are_stale_and_the_rest_is_refused() {
    let mut rng = fresh_rng();
    let answer = Answer::random(&mut rng, 200, WireDtype::F8E4m3, true, 3);
    let refusal = |change: &dyn Fn(&mut FrameHeader)| {
        let mut frame = answer.frame();
        reseal(&mut frame, change);
        let (mut memory, mut scratch) = (Guarded::new(MEMORY_BYTES), ResponseScratch::default());
        match decode_response(memory.hold(&frame), &answer.expect, &mut scratch) {
            Ok(_) => panic!("must be refused"),
            Err(error) => error,
        }
    };
    type Change = fn(&mut FrameHeader);
    let stale: [(&str, Change); 5] = [
        ("client_id", |h| h.client_id ^= 1 << 63),
        ("generation", |h| h.generation ^= 1),
        ("sequence", |h| h.sequence ^= 1),
        ("layer", |h| h.layer ^= 1),
        ("frame_idx", |h| (h.frame_idx, h.num_frames) = (1, 2)),
    ];
    for (field, change) in stale {
        let error = refusal(&change);
        assert!(error.is_stale() && names(&error) == field, "{error}");
    }
    // The response to an older, smaller request is reported as stale, not as having the wrong size.
    let error = refusal(&|h| {
        h.sequence ^= 1;
        h.num_tokens = 2;
        h.total_bytes -= u64::from(h.row_stride_bytes);
    });
    assert!(error.is_stale(), "{error}");
    let wrong: [(&str, Change); 5] = [
        ("num_tokens", |h| {
            h.num_tokens = 2;
            h.total_bytes -= u64::from(h.row_stride_bytes);
        }),
        ("num_entries", |h| h.num_entries = 1),
        ("response_dtype", |h| h.response_dtype = 1),
        ("hidden", |h| h.hidden -= 1),
        ("payload", |h| h.payload_offset += 128),
    ];
    for (field, change) in wrong {
        let error = refusal(&change);
        assert_eq!(names(&error), field, "{error}");
    }
    for kind in [0, 1, 4] {
        assert!(matches!(refusal(&|h| h.kind = kind), FrameError::Kind { .. }));
    }
}

#[test]
fn error_frames_are_checked_like_the_others() {
    let mut rng = fresh_rng();
    let answer = Answer::random(&mut rng, 8, WireDtype::F32, false, 1);
    let frame = crate::common::frame(|view| {
        encode_error(view, &answer.meta.id, ErrorCode::Overloaded, [5, 6], "too much")
    });
    let decode = |frame: &[u8]| {
        let (mut memory, mut scratch) = (Guarded::new(MEMORY_BYTES), ResponseScratch::default());
        match decode_response(memory.hold(frame), &answer.expect, &mut scratch) {
            Ok(Response::Error(error)) => Ok(error.message.to_owned()),
            Ok(Response::Rows(_)) => panic!("an error frame has no rows"),
            Err(error) => Err(error),
        }
    };
    assert_eq!(decode(&frame).as_deref(), Ok("too much"));
    let reseal_body = |change: &dyn Fn(&mut ErrorBody)| {
        let mut frame = frame.clone();
        let mut body: ErrorBody = bytemuck::pod_read_unaligned(&frame[HEADER_BYTES..]);
        change(&mut body);
        frame[HEADER_BYTES..].copy_from_slice(bytemuck::bytes_of(&body));
        reseal(&mut frame, |h| h.payload_crc = crc32c::crc32c(bytemuck::bytes_of(&body)));
        frame
    };
    let error = decode(&reseal_body(&|body| body.message_len = 241)).expect_err("too long");
    assert_eq!(names(&error), "message_len");
    assert!(decode(&reseal_body(&|body| body.message_len = u32::MAX)).is_err());
    let error = decode(&reseal_body(&|body| body.message[3] = 0xff)).expect_err("not UTF-8");
    assert_eq!(error, FrameError::ErrorMessage { at: 3 });
    // Zeros after the message are UTF-8 as well, but the length determines its end.
    assert_eq!(decode(&reseal_body(&|body| body.message_len = 3)).as_deref(), Ok("too"));

    type Change = fn(&mut FrameHeader);
    let changes: [(&str, Change); 9] = [
        ("flags", |h| {
            h.flags &= !FLAG_PAYLOAD_CRC;
            h.payload_crc = 0;
        }),
        ("num_tokens", |h| h.num_tokens = 1),
        ("hidden", |h| h.hidden = 1),
        ("dtype", |h| h.dtype = 1),
        ("server_queue_ns", |h| h.server_queue_ns = 1),
        ("total_bytes", |h| h.total_bytes += 1),
        ("error body", |h| h.payload_offset = 0),
        ("error body", |h| h.payload_offset += 128),
        ("error body", |h| h.payload_offset = u32::MAX - 127),
    ];
    for (field, change) in changes {
        let mut changed = frame.clone();
        reseal(&mut changed, change);
        assert_eq!(names(&decode(&changed).expect_err(field)), field);
    }
    let mut changed = frame.clone();
    reseal(&mut changed, |h| h.sequence ^= 1);
    assert!(decode(&changed).expect_err("stale").is_stale());
    for len in 0..frame.len() {
        assert!(decode(&frame[..len]).is_err());
    }
}
