//! Decoded frames of random shapes equal the sent values, converted as the standards define.

use crate::common::guarded::Guarded;
use crate::common::{Answer, MEMORY_BYTES, Request, covered, fresh_rng, geometry, header_of};
use rand::RngExt;
use switchyard_protocol::{
    DispatchMeta, DispatchScratch, EncodeError, Entry, ErrorCode, FrameError, FrameGeometry,
    FrameId, Response, ResponseScratch, TokenRef, WireDtype, decode_dispatch, decode_response,
    encode_combine, encode_dispatch, encode_error, peek_id, response_id,
};

#[test]
fn dispatch_frames_of_random_shapes_round_trip() {
    let mut rng = fresh_rng();
    let mut scratch = DispatchScratch::default();
    let mut memory = Guarded::new(MEMORY_BYTES);
    for round in 0..600 {
        let dtype = WireDtype::ALL[round % 4];
        let hidden = [rng.random_range(1..400), 2048, 2049, 4100][rng.random_range(0..4)];
        let checksum = rng.random_bool(0.5);
        let request = Request::random(&mut rng, hidden, dtype, checksum, 12);
        let frame = request.frame();
        let num_entries: usize = request.tokens.iter().map(|t| t.entry_count as usize).sum();
        let geometry = geometry(&request);
        assert_eq!(frame.len(), geometry.request_bytes(request.tokens.len(), num_entries));

        let view = memory.hold(&frame);
        assert_eq!(peek_id(view), Some(request.meta.id));
        let mut dispatch = decode_dispatch(view, &request.expect, &mut scratch).expect("sound");
        assert_eq!(dispatch.id(), request.meta.id);
        assert_eq!(dispatch.total_bytes(), frame.len() as u64);
        assert_eq!(dispatch.num_tokens(), request.tokens.len());
        assert_eq!(dispatch.entries().len(), num_entries);
        for (token, sent) in request.tokens.iter().enumerate() {
            let begin = sent.entry_begin as usize;
            let entries = &request.entries[begin..begin + sent.entry_count as usize];
            assert_eq!(dispatch.entries_of(token), entries);
        }
        let meta = dispatch.response_meta();
        assert_eq!((meta.id, meta.hidden), (request.meta.id, hidden));
        assert_eq!((meta.dtype, meta.payload_checksum), (request.meta.response_dtype, checksum));

        // In pieces, into poisoned memory.
        let expected = request.expected_rows();
        let mut found = vec![f32::NAN; expected.len()];
        let split = rng.random_range(0..=request.tokens.len());
        let (head, tail) = found.split_at_mut(split * hidden);
        dispatch.read_rows_f32(0..split, head).expect("rows");
        dispatch.read_rows_f32(split..request.tokens.len(), tail).expect("rows");
        assert_eq!(found, expected, "{dtype} hidden {hidden}");
    }
}

#[test]
fn combine_frames_of_random_shapes_round_trip() {
    let mut rng = fresh_rng();
    let mut scratch = ResponseScratch::default();
    let mut memory = Guarded::new(MEMORY_BYTES);
    for round in 0..600 {
        let dtype = WireDtype::ALL[round % 4];
        let hidden = [rng.random_range(1..400), 2048, 2049, 4100][rng.random_range(0..4)];
        let (checksum, num_tokens) = (rng.random_bool(0.5), rng.random_range(1..12));
        let answer = Answer::random(&mut rng, hidden, dtype, checksum, num_tokens);
        let view = memory.hold(&answer.frame());
        assert_eq!(response_id(view, &mut scratch), Ok(answer.meta.id));
        let response = decode_response(view, &answer.expect, &mut scratch).expect("sound");
        let Response::Rows(mut rows) = response else { panic!("an answer has rows") };
        assert_eq!((rows.num_rows(), rows.hidden(), rows.dtype()), (num_tokens, hidden, dtype));
        assert_eq!(rows.server_times(), answer.meta.times);
        let mut found = vec![f32::NAN; num_tokens * hidden];
        rows.read_rows_f32(0..num_tokens, &mut found).expect("rows");
        let expected: Vec<f32> = answer
            .rows
            .chunks(hidden)
            .flat_map(|row| crate::common::through_wire(dtype, row))
            .collect();
        assert_eq!(found, expected, "{dtype} hidden {hidden}");
        // Again, by adding each row to ones.
        for (row_idx, row) in expected.chunks(hidden).enumerate() {
            let mut sum = vec![1f32; hidden];
            rows.add_row_f32(row_idx, &mut sum).expect("rows");
            assert!(sum.iter().zip(row).all(|(sum, value)| *sum == 1.0 + value));
        }
    }
}

#[test]
fn error_frames_round_trip_and_long_messages_are_cut_between_characters() {
    let mut rng = fresh_rng();
    let answer = Answer::random(&mut rng, 8, WireDtype::F32, false, 1);
    let mut scratch = ResponseScratch::default();
    let mut memory = Guarded::new(MEMORY_BYTES);
    for (message, expected_len) in
        [(String::new(), 0), ("expert 7".into(), 8), ("x".repeat(999), 240), ("€".repeat(99), 240)]
            .into_iter()
            .chain([(format!("x{}", "€".repeat(99)), 238)])
    {
        let (code, detail) = (ErrorCode::from_u32(rng.random_range(0..20)), rng.random());
        let frame =
            crate::common::frame(|v| encode_error(v, &answer.meta.id, code, detail, &message));
        let view = memory.hold(&frame);
        assert_eq!(response_id(view, &mut scratch), Ok(answer.meta.id));
        match decode_response(view, &answer.expect, &mut scratch).expect("sound") {
            Response::Error(error) => {
                assert_eq!((error.code, error.detail), (code, detail));
                assert_eq!(error.message, &message[..expected_len]);
            }
            Response::Rows(_) => panic!("an error frame has no rows"),
        }
    }
}

#[test]
fn the_bytes_of_a_frame_are_as_documented() {
    let id = FrameId {
        epoch: 0x0102_0304_0506_0708,
        client_id: 0x1112_1314_1516_1718,
        generation: 0x2122_2324,
        sequence: 0x3132_3334_3536_3738,
        layer: 3,
        frame_idx: 1,
        num_frames: 2,
    };
    let meta = DispatchMeta {
        id,
        hidden: 3,
        dtype: WireDtype::Bf16,
        response_dtype: WireDtype::F32,
        payload_checksum: true,
    };
    let x = [1.0, -2.0, 0.5, 9.0, 9.0, 9.0, 3.0, 4.0, 5.0];
    let tokens = [
        TokenRef { token: 2, entry_begin: 1, entry_count: 1 },
        TokenRef { token: 0, entry_begin: 4, entry_count: 2 },
    ];
    let entries = [5, 6, 7, 8, 9, 10].map(|expert| Entry { expert, weight: expert as f32 });
    let frame = crate::common::frame(|view| encode_dispatch(view, &meta, &x, &tokens, &entries));

    let mut expected = Vec::new();
    expected.extend(0x0102_0304_0506_0708u64.to_le_bytes());
    expected.extend(0x1112_1314_1516_1718u64.to_le_bytes());
    expected.extend(0x3132_3334_3536_3738u64.to_le_bytes());
    expected.extend(0x2122_2324u32.to_le_bytes());
    expected.extend(3u32.to_le_bytes());
    expected.extend(b"SYFR");
    for half in [1u16, 1, 3, 1] {
        expected.extend(half.to_le_bytes());
    }
    // Flags, tokens, entries, hidden, frame, frames, stride; then the sections.
    for word in [1u32, 2, 3, 3, 1, 2, 16, 128, 144, 176, 256] {
        expected.extend(word.to_le_bytes());
    }
    expected.extend(288u64.to_le_bytes());
    let rows = [0x4040u16, 0x4080, 0x40a0, 0x3f80, 0xc000, 0x3f00];
    let rows: Vec<u8> = rows.iter().flat_map(|code| code.to_le_bytes()).collect();
    let tables: Vec<u8> = [0u32, 1, 1, 2]
        .into_iter()
        .chain([6, 6f32.to_bits(), 9, 9f32.to_bits(), 10, 10f32.to_bits()])
        .flat_map(u32::to_le_bytes)
        .collect();
    let mut summed = tables.clone();
    summed.extend(&expected);
    summed.extend([0; 4]);
    summed.extend(crc32c_bitwise(&rows).to_le_bytes());
    summed.extend([0; 24]);
    expected.extend(crc32c_bitwise(&summed).to_le_bytes());
    expected.extend(crc32c_bitwise(&rows).to_le_bytes());
    expected.extend([0; 24]);
    expected.extend(&tables);

    assert_eq!(frame.len(), 288);
    assert_eq!(frame[..168], expected);
    assert_eq!((&frame[256..262], &frame[272..278]), (&rows[..6], &rows[6..]));
    // The rest is padding, which the encoder does not write.
    let covered = covered(&frame);
    for (at, byte) in frame.iter().enumerate() {
        assert!(covered[at] || *byte == crate::common::POISON, "byte {at}");
    }
}

#[test]
fn what_cannot_be_sent_is_named() {
    let mut memory = Guarded::new(MEMORY_BYTES);
    let mut rng = fresh_rng();
    let mut request = Request::random(&mut rng, 16, WireDtype::Bf16, false, 4);
    request.tokens = vec![TokenRef { token: 0, entry_begin: 0, entry_count: 2 }];
    let mut encode = |request: &Request, bytes: usize| {
        let Request { meta, x, tokens, entries, .. } = request;
        encode_dispatch(&mut memory.write(bytes), meta, x, tokens, entries)
            .expect_err("must be refused")
    };

    let error = encode(&Request { tokens: Vec::new(), ..request.clone() }, MEMORY_BYTES);
    assert_eq!(error, EncodeError::NoTokens);
    let mut changed = request.clone();
    changed.x.pop();
    let expected = EncodeError::PartialRow { found: changed.x.len(), hidden: 16 };
    assert_eq!(encode(&changed, MEMORY_BYTES), expected);
    let mut changed = request.clone();
    changed.tokens[0].token = 4;
    assert!(matches!(encode(&changed, MEMORY_BYTES), EncodeError::Row { row: 4, .. }));
    for (entry_begin, entry_count) in [(0, 0), (0, u32::MAX), (u32::MAX, u32::MAX), (1 << 20, 1)] {
        let mut changed = request.clone();
        changed.tokens[0] = TokenRef { token: 0, entry_begin, entry_count };
        assert!(matches!(encode(&changed, MEMORY_BYTES), EncodeError::Entries { .. }));
    }
    for weight in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut changed = request.clone();
        changed.entries[1].weight = weight;
        assert!(matches!(encode(&changed, MEMORY_BYTES), EncodeError::Weight { row: 0, .. }));
    }
    for hidden in [0, usize::MAX] {
        let mut changed = request.clone();
        changed.meta.hidden = hidden;
        assert!(matches!(encode(&changed, MEMORY_BYTES), EncodeError::Hidden { .. }));
    }
    // Header 128, one range and two entries in 16 each, 80 of padding... in all 256 and a row of 32.
    assert!(matches!(
        encode(&request, 287),
        EncodeError::FrameTooSmall { needed: 288, found: 287, .. }
    ));
}

#[test]
fn as_many_tokens_as_the_geometry_says_fit() {
    let (hidden, top_k, frame_bytes) = (130, 2, 64 << 10);
    for dtype in WireDtype::ALL {
        let geometry =
            FrameGeometry::new(frame_bytes, hidden, dtype, WireDtype::F32, top_k).expect("fits");
        let num_tokens = geometry.max_tokens();
        let mut rng = fresh_rng();
        let request = Request::random(&mut rng, hidden, dtype, true, 1);
        let x = crate::common::random_values(&mut rng, (num_tokens + 1) * hidden);
        let entries = vec![Entry { expert: 1, weight: 0.5 }; (num_tokens + 1) * top_k];
        let tokens: Vec<TokenRef> = (0..=num_tokens as u32)
            .map(|token| TokenRef { token, entry_begin: token * 2, entry_count: 2 })
            .collect();
        let mut memory = Guarded::new(frame_bytes);
        let mut view = memory.write(frame_bytes);
        let all = encode_dispatch(&mut view, &request.meta, &x, &tokens[..num_tokens], &entries);
        assert!(all.expect("fits") <= frame_bytes);
        let answer = Answer::random(&mut rng, hidden, WireDtype::F32, false, num_tokens);
        let all = encode_combine(&mut view, &answer.meta, &answer.rows);
        assert!(all.expect("fits") <= frame_bytes);
    }
}

#[test]
fn rows_out_of_turn_are_refused_only_with_a_checksum() {
    let mut rng = fresh_rng();
    let mut memory = Guarded::new(MEMORY_BYTES);
    let mut scratch = ResponseScratch::default();
    for checksum in [false, true] {
        let answer = Answer::random(&mut rng, 20, WireDtype::F16, checksum, 3);
        let view = memory.hold(&answer.frame());
        let response = decode_response(view, &answer.expect, &mut scratch).expect("sound");
        let Response::Rows(mut rows) = response else { panic!("an answer has rows") };
        assert_eq!(rows.has_checksum(), checksum);
        let mut out = [0f32; 60];
        let out_of_turn = rows.read_rows_f32(1..2, &mut out[..20]);
        assert_eq!(matches!(out_of_turn, Err(FrameError::RowOrder { .. })), checksum);
        assert!(rows.read_rows_f32(0..2, &mut out[..40]).is_ok());
        // Reading from row 0 again is allowed.
        assert!(rows.read_rows_f32(0..1, &mut out[..20]).is_ok());
        assert!(rows.read_rows_f32(1..3, &mut out[20..]).is_ok());
        for rows_asked in [2..4, 3..4, 0..usize::MAX, usize::MAX..usize::MAX] {
            let result = rows.read_rows_f32(rows_asked, &mut out);
            assert!(matches!(result, Err(FrameError::RowOrder { .. })));
        }
        assert!(rows.add_row_f32(usize::MAX, &mut out[..20]).is_err());
        let result = rows.read_rows_f32(0..3, &mut out[..59]);
        assert!(matches!(result, Err(FrameError::RowBuffer { found: 59, expected: 60 })));
    }
}

#[test]
fn values_that_are_not_finite_stay_in_their_row() {
    let mut rng = fresh_rng();
    let mut memory = Guarded::new(MEMORY_BYTES);
    for dtype in WireDtype::ALL {
        let mut answer = Answer::random(&mut rng, 150, dtype, true, 3);
        answer.rows[150 + 7] = f32::NAN;
        answer.rows[150 + 149] = f32::INFINITY;
        let frame = answer.frame();
        assert_eq!(header_of(&frame).num_tokens, 3);
        let mut scratch = ResponseScratch::default();
        let view = memory.hold(&frame);
        let response = decode_response(view, &answer.expect, &mut scratch).expect("sound");
        let Response::Rows(mut rows) = response else { panic!("an answer has rows") };
        let mut out = vec![0f32; 450];
        rows.read_rows_f32(0..3, &mut out).expect("rows");
        for (at, value) in out.iter().enumerate() {
            assert_eq!(value.is_finite(), at != 157 && at != 299, "{dtype} {at}");
        }
        assert!(out[157].is_nan());
    }
}

/// CRC-32C by its definition: reflected polynomial 0x1edc6f41, one bit at a time.
fn crc32c_bitwise(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}
