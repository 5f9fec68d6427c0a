//! A server looks at all of its peers all the time: what one idle peer costs, and that none is missed.

use std::time::Instant;

use p2p_core::backend::local;
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::{Channel, SlotConfig};

#[test]
fn a_frame_among_a_thousand_idle_channels_is_found() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    let mut pairs: Vec<_> = (0..1024).map(|_| local::pair(config).unwrap()).collect();
    assert!(ready(&pairs).is_empty());
    let rounds = 1000;
    let start = Instant::now();
    for _ in 0..rounds {
        assert!(!pairs.iter().any(|(_, channel)| channel.has_frame()));
    }
    let per_channel_ns = start.elapsed().as_nanos() / (rounds * pairs.len() as u128);
    println!("{per_channel_ns} ns per idle channel of {}", pairs.len());
    for idx in [0, 511, 1023] {
        let frame = pairs[idx].0.try_reserve().unwrap().unwrap();
        pairs[idx].0.publish(frame, 0).unwrap();
    }
    assert_eq!(ready(&pairs), [0, 511, 1023]);
}

fn ready(pairs: &[(Channel<MappedEndpoint>, Channel<MappedEndpoint>)]) -> Vec<usize> {
    (0..pairs.len()).filter(|idx| pairs[*idx].1.has_frame()).collect()
}
