//! Random requests, good and bad ones.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt};
use switchyard_softnic::format::{
    Atomic, BLOCK_BYTES, Head, Local, MAX_MESSAGE_BYTES, Operation, Remote, Source, Wqe,
};

use super::world::{MEMORY_BYTES, Names};

/// Targets of a batch's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Anywhere, so that they must be executed one after the other.
    Anywhere,
    /// Each where no other of the batch goes but adds, so that answers may land late.
    Apart,
}

/// Most requests of a batch; most bytes of one where they go apart.
pub const MOST_REQUESTS: usize = 40;
const APART_BYTES: usize = 512;
const HALF: usize = 20 << 10;

/// The request at `position` of a batch, as bytes.
pub fn random(rng: &mut SmallRng, names: &Names, plan: Plan, position: usize) -> [u8; BLOCK_BYTES] {
    let mut wqe = good(rng, names, plan, position);
    if rng.random_ratio(1, 24) {
        spoil(rng, names, &mut wqe);
    }
    let mut block: [u8; BLOCK_BYTES] = wqe.encode().try_into().unwrap();
    if plan == Plan::Anywhere && rng.random_ratio(1, 24) {
        let whole = block;
        for _ in 0..1000 {
            block = whole;
            for _ in 0..rng.random_range(1..=3) {
                block[rng.random_range(0..BLOCK_BYTES)] ^= 1 << rng.random_range(0..8);
            }
            if is_for_both(&block) {
                return block;
            }
        }
        return whole;
    }
    block
}

/// Whether all NICs execute the request, not only the model in Rust.
fn is_for_both(block: &[u8; BLOCK_BYTES]) -> bool {
    let head = Head::decode(block).unwrap();
    if head.num_segments > 4 {
        return false;
    }
    match Wqe::decode(&block[..head.num_segments as usize * 16]) {
        Ok(Wqe { operation, .. }) => match operation {
            Operation::Write(_, Source::Gather(pieces))
            | Operation::WriteImm(_, Source::Gather(pieces), _)
            | Operation::Read(_, pieces) => pieces.len() < 2,
            Operation::Atomic(_, Atomic::MaskedSwap8 { .. }, _) => false,
            _ => true,
        },
        Err(_) => true,
    }
}

/// A request that works.
pub fn good(rng: &mut SmallRng, names: &Names, plan: Plan, position: usize) -> Wqe {
    let most = if plan == Plan::Apart { APART_BYTES - 8 } else { 3000 };
    let num_bytes = match rng.random_range(0..4) {
        0 => 8 * rng.random_range(0..=most / 8),
        1 => rng.random_range(0..=32),
        _ => rng.random_range(0..=most),
    };
    let place = |rng: &mut SmallRng, from: usize, slot: Option<usize>, room: usize| {
        let align = [1, 4, 8, 16][rng.random_range(0..4)];
        let at = match slot {
            Some(slot) => from + slot * APART_BYTES,
            None => from + rng.random_range(0..=room - num_bytes),
        };
        // Within a slot only where nothing is left over.
        if slot.is_some() { at } else { at / align * align }
    };
    let is_apart = plan == Plan::Apart;
    let slot = is_apart.then_some(position);
    // Sources and memory to read lie in the first part, targets and landings in the second.
    let source = place(rng, 0, None, if is_apart { HALF } else { MEMORY_BYTES });
    let landing = if is_apart { HALF } else { 0 };
    let landing = place(rng, landing, slot, MEMORY_BYTES);
    let local = |offset: usize, num_bytes: usize| Local {
        address: names.local + offset as u64,
        lkey: names.lkey,
        num_bytes: num_bytes as u32,
    };
    let remote =
        |offset: usize| Remote { address: names.remote + offset as u64, rkey: names.rkeys[0] };
    let answer = |num_bytes| {
        let landing = landing.min(MEMORY_BYTES - 8);
        local(landing, num_bytes)
    };
    // Words of adds lie behind everything else.
    let word = MEMORY_BYTES - 64 + 8 * rng.random_range(0..8usize);
    let source_of = |rng: &mut SmallRng| match rng.random_range(0..6) {
        0 => Source::Gather(vec![]),
        1 | 2 => {
            let mut bytes = vec![0; num_bytes.min(rng.random_range(0..=28))];
            rng.fill_bytes(&mut bytes);
            Source::Inline(bytes)
        }
        _ => Source::Gather(vec![local(source, num_bytes)]),
    };
    let operation = match rng.random_range(0..12) {
        0 => Operation::Nop,
        1 => Operation::Dump(local(source, num_bytes)),
        2..=4 => Operation::Write(remote(landing), source_of(rng)),
        5 => Operation::WriteImm(remote(landing), source_of(rng), rng.random()),
        6 | 7 => {
            let pieces =
                if rng.random_ratio(1, 6) { vec![] } else { vec![local(landing, num_bytes)] };
            Operation::Read(remote(source), pieces)
        }
        8 => Operation::Atomic(remote(word), Atomic::Add8(rng.random()), answer(8)),
        9 => {
            let atomic = Atomic::MaskedAdd4(rng.random(), rng.random());
            Operation::Atomic(remote(word + 4 * rng.random_range(0..2usize)), atomic, answer(4))
        }
        10 => {
            let atomic = Atomic::MaskedAdd8(rng.random(), rng.random());
            Operation::Atomic(remote(word), atomic, answer(8))
        }
        _ => {
            // Half of them would need to know the current value.
            let atomic = Atomic::Swap8 { swap: rng.random(), compare: 0 };
            Operation::Atomic(remote(word), atomic, answer(8))
        }
    };
    let completion = [0x00, 0x08, 0x08, 0x0c][rng.random_range(0..4)];
    let fence = [0x00, 0x00, 0x20, 0x40, 0x60, 0x80][rng.random_range(0..6)];
    let solicited = [0, 2][rng.random_range(0..2)];
    let flags = completion | fence | solicited;
    Wqe { qpn: names.qpn, index: position as u16, flags, operation }
}

/// Makes a request fail, in one of the possible kinds.
fn spoil(rng: &mut SmallRng, names: &Names, wqe: &mut Wqe) {
    let kind = rng.random_range(0..8);
    match kind {
        0 => {
            wqe.index ^= 1 << rng.random_range(0..16);
            return;
        }
        1 => {
            wqe.qpn ^= 1 << rng.random_range(0..24);
            return;
        }
        _ => {}
    }
    let far = MEMORY_BYTES as u64;
    let (remote, pieces): (Option<&mut Remote>, Option<&mut Local>) = match &mut wqe.operation {
        Operation::Nop => (None, None),
        Operation::Dump(local) => (None, Some(local)),
        Operation::Write(remote, Source::Gather(pieces))
        | Operation::WriteImm(remote, Source::Gather(pieces), _)
        | Operation::Read(remote, pieces) => (Some(remote), pieces.first_mut()),
        Operation::Write(remote, _) | Operation::WriteImm(remote, ..) => (Some(remote), None),
        Operation::Atomic(remote, _, local) => (Some(remote), Some(local)),
    };
    match (kind, remote, pieces) {
        (2, Some(remote), _) => remote.rkey = rng.random_range(1..0xffff),
        (3, Some(remote), _) => remote.rkey = names.rkeys[rng.random_range(1..4)],
        (4, Some(remote), _) => remote.address = names.remote + far,
        (5, _, Some(local)) => {
            local.lkey = [names.read_only_lkey, 0x77][rng.random_range(0..2)];
        }
        (6, _, Some(local)) => local.address = names.local + far,
        (_, Some(remote), Some(local)) => match rng.random_range(0..3) {
            0 => local.num_bytes = MAX_MESSAGE_BYTES + 8,
            1 => local.num_bytes += 1,
            _ => remote.address += 1,
        },
        _ => {}
    }
}
