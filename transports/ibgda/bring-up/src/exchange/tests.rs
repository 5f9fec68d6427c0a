//! Messages that peers may send.

use super::*;

fn hello() -> Hello {
    Hello {
        is_connector: true,
        is_devx: false,
        is_software: true,
        has_gpu: true,
        first: Stage::Nop,
        last: Stage::Reset,
        num_queues: 3,
        depth: 128,
        num_wraps: 2,
        slot_bytes: 1 << 20,
        seed: 0x0123_4567_89ab_cdef,
    }
}

#[test]
fn greetings_lead_back_and_every_byte_is_looked_at() {
    let good = hello().encode();
    assert_eq!(Hello::decode(&good).unwrap(), hello());
    for at in 0..HELLO_BYTES {
        let mut bytes = good;
        bytes[at] ^= 0x80;
        match Hello::decode(&bytes) {
            Ok(found) => assert_ne!(found, hello(), "byte {at} says nothing"),
            Err(error) => assert!(error.to_string().contains("greeting: `"), "{error}"),
        }
    }
    for len in 0..HELLO_BYTES {
        assert!(Hello::decode(&good[..len]).is_err());
    }
}

#[test]
fn random_greetings_are_refused_or_lead_back() {
    for _ in 0..20_000 {
        let mut bytes: [u8; HELLO_BYTES] = std::array::from_fn(|_| rand::random());
        // Often enough close to a good one.
        for at in [0, 1, 2, 5, 6, 7, 20, 21, 22, 23] {
            bytes[at] &= rand::random::<u8>() & rand::random::<u8>() & 1;
        }
        bytes[3] %= 20;
        bytes[4] %= 20;
        if let Ok(found) = Hello::decode(&bytes) {
            assert_eq!(found.encode(), bytes);
        }
    }
}

/// Every input of the connection ends in an error that can be printed, within bounds.
#[test]
fn random_bytes_are_refused() {
    for round in 0..200_u32 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut channel = Channel::accept(&listener, Duration::from_secs(10)).unwrap();
        let mut bytes: Vec<u8> = (0..64).map(|_| rand::random()).collect();
        if round % 2 == 0 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&[(round / 2 % 4) as u8, 0, 0, 0]);
        }
        other.write_all(&bytes).unwrap();
        drop(other);
        let error = channel.meet(Stage::Nop, 1, Duration::from_secs(10)).unwrap_err();
        assert!(error.to_string().contains("peer"), "{error}");
    }
}
