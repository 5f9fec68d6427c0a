//! Hellos: round trips, damage, and the comparison of models.

use proptest::prelude::*;
use switchyard_protocol::{
    ClientHello, HelloDecodeError, HelloReject, ModelShape, ServerHello, WireDtype, hello,
};

fn model() -> impl Strategy<Value = ModelShape> {
    let numbers = (1u32..=1 << 20, 1u32..=1 << 16, 1u32..=1 << 20, 1u32..=1024);
    (any::<[u8; 32]>(), numbers).prop_map(
        |(fingerprint, (hidden, num_layers, num_experts, top_k))| ModelShape {
            fingerprint,
            hidden,
            num_layers,
            num_experts,
            top_k,
        },
    )
}

fn client() -> impl Strategy<Value = ClientHello> {
    let dtype = || prop::sample::select(&WireDtype::ALL[..]);
    (model(), any::<u64>(), dtype(), dtype(), "[a-zé-]{0,40}").prop_map(
        |(model, client_id, dtype, response_dtype, name)| ClientHello {
            model,
            client_id,
            dtype,
            response_dtype,
            name,
        },
    )
}

fn server() -> impl Strategy<Value = ServerHello> {
    (model(), any::<(u64, u64, u32, u32)>(), "[a-zé-]{0,40}").prop_map(
        |(model, (incarnation, epoch, generation, progress_interval_us), name)| ServerHello {
            model,
            incarnation,
            epoch,
            generation,
            progress_interval_us,
            name,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn hellos_round_trip_and_no_other_bytes_mean_the_same(
        client in client(),
        server in server(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        len in any::<prop::sample::Index>(),
    ) {
        let bytes = client.encode();
        prop_assert!(bytes.len() <= 4096);
        prop_assert_eq!(ClientHello::decode(&bytes), Ok(client));
        prop_assert!(ServerHello::decode(&bytes).is_err());
        prop_assert!(ClientHello::decode(&bytes[..len.index(bytes.len())]).is_err());
        let mut longer = bytes.clone();
        longer.push(byte);
        prop_assert!(ClientHello::decode(&longer).is_err());
        let mut changed = bytes.clone();
        changed[at.index(bytes.len())] = byte;
        if let Ok(hello) = ClientHello::decode(&changed) {
            prop_assert_eq!(hello.encode(), changed);
        }

        let bytes = server.encode();
        prop_assert_eq!(ServerHello::decode(&bytes), Ok(server));
        prop_assert!(ClientHello::decode(&bytes).is_err());
        prop_assert!(ServerHello::decode(&bytes[..len.index(bytes.len())]).is_err());
        let mut changed = bytes.clone();
        changed[at.index(bytes.len())] = byte;
        if let Ok(hello) = ServerHello::decode(&changed) {
            prop_assert_eq!(hello.encode(), changed);
        }
    }

    #[test]
    fn noise_is_no_hello(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(ClientHello::decode(&bytes).is_err());
        prop_assert!(ServerHello::decode(&bytes).is_err());
    }
}

fn example() -> ClientHello {
    let model =
        ModelShape { fingerprint: [1; 32], hidden: 256, num_layers: 4, num_experts: 16, top_k: 4 };
    ClientHello {
        model,
        client_id: 7,
        dtype: WireDtype::F32,
        response_dtype: WireDtype::Bf16,
        name: "client".into(),
    }
}

#[test]
fn names_are_cut_between_characters_and_cleared_of_control_characters() {
    let long = ClientHello { name: "é".repeat(200), ..example() };
    let name = ClientHello::decode(&long.encode()).expect("own bytes").name;
    assert_eq!(name, "é".repeat(hello::MAX_NAME_BYTES / 2));
    let nasty = ClientHello { name: "a\x1b[31mb\nc".into(), ..example() };
    assert_eq!(ClientHello::decode(&nasty.encode()).expect("own bytes").name, "a [31mb c");
    // A decoder refuses control characters from a peer that does not replace them.
    let mut bytes = example().encode();
    *bytes.last_mut().expect("name") = 0x1b;
    assert_eq!(ClientHello::decode(&bytes), Err(HelloDecodeError::Name { at: 5 }));
    *bytes.last_mut().expect("name") = 0xff;
    assert_eq!(ClientHello::decode(&bytes), Err(HelloDecodeError::Name { at: 5 }));
}

#[test]
fn numbers_out_of_range_are_named() {
    let mut bytes = example().encode();
    for (at, field) in [(40, "hidden"), (44, "num_layers"), (48, "num_experts"), (52, "top_k")] {
        for value in [0, u32::MAX] {
            let mut changed = bytes.clone();
            changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
            if (field, value) == ("num_layers", ModelShape::UNKNOWN_LAYERS) {
                let model =
                    ClientHello::decode(&changed).expect("a client may leave it open").model;
                assert_eq!(model.num_layers, ModelShape::UNKNOWN_LAYERS);
                continue;
            }
            let error = ClientHello::decode(&changed).expect_err(field);
            assert!(matches!(error, HelloDecodeError::Field { field: f, .. } if f == field));
        }
    }
    bytes[4] = 2;
    let expected = HelloDecodeError::Version { found: 2, expected: 1 };
    assert_eq!(ClientHello::decode(&bytes), Err(expected));
}

#[test]
fn the_first_difference_between_models_is_told_with_both_values() {
    let client = example().model;
    assert_eq!(client.check_against(&client), Ok(()));
    let open = ModelShape { num_layers: ModelShape::UNKNOWN_LAYERS, ..client };
    assert_eq!(open.check_against(&client), Ok(()));
    assert_eq!(client.check_against(&open), Ok(()));
    let server = ModelShape { num_experts: 128, ..client };
    let reject = client.check_against(&server).expect_err("differ");
    let text = reject.to_string();
    assert!(text.contains("num_experts") && text.contains("16") && text.contains("128"), "{text}");
    let server = ModelShape { fingerprint: [0xab; 32], ..client };
    let reject = client.check_against(&server).expect_err("differ");
    let text = reject.to_string();
    assert!(text.contains(&"01".repeat(32)) && text.contains(&"ab".repeat(32)), "{text}");
    assert_eq!(HelloReject::is_permanent(reject.code()), Some(true));
    let unknown = ModelShape { fingerprint: ModelShape::UNKNOWN_FINGERPRINT, ..client };
    assert_eq!(unknown.check_against(&server), Ok(()));
    assert_eq!(server.check_against(&unknown), Ok(()));
    let other = ModelShape { top_k: 5, ..server };
    assert!(matches!(unknown.check_against(&other), Err(HelloReject::Shape { .. })));
    let draining = HelloReject::Draining { server: "a".into() };
    assert_eq!(HelloReject::is_permanent(draining.code()), Some(false));
    assert_eq!(HelloReject::is_permanent(1), None);
}
