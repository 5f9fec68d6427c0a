use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::sync::mpsc;

use test_support::child;

use super::*;
use p2p_core::region::Region;

/// Two fabrics of this process, with their ids of each other.
fn pair() -> ((CmaFabric, PeerId), (CmaFabric, PeerId)) {
    let (mut a, mut b) = (CmaFabric::new().unwrap(), CmaFabric::new().unwrap());
    let (a_id, a_detail) = a.open_peer().unwrap();
    let (b_id, b_detail) = b.open_peer().unwrap();
    a.join_peer(a_id, &b_detail).unwrap();
    b.join_peer(b_id, &a_detail).unwrap();
    ((a, a_id), (b, b_id))
}

/// A thread that sleeps on an idle fabric must not be woken by it.
#[test]
fn an_idle_fabric_is_not_readable() {
    let fabric = CmaFabric::new().unwrap();
    let mut fds = [PollFd::new(&fabric.idle, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&now)), Ok(0));
}

/// Ranges that share a system call end separately: each with its bytes, each with its own failure.
#[test]
fn operations_of_one_system_call_end_separately() {
    const RANGE: usize = 512;
    const NUM: usize = 3 * MAX_BATCH;
    let ((mut a, a_id), (mut b, _)) = pair();
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed);
    let mut near = vec![0u8; RANGE * NUM];
    rand::Rng::fill_bytes(&mut rng, &mut near[..]);
    let mut distant = [vec![0xa5u8; RANGE * NUM], vec![0xa5u8; RANGE * NUM]];
    // SAFETY: all of it outlives both fabrics' last copies, and is not touched meanwhile.
    let (local, remotes) = unsafe {
        let ptr = NonNull::new(near.as_mut_ptr()).unwrap();
        let local = a.register(ptr, near.len(), Access::Local).unwrap();
        let remotes = [0, 1].map(|nth: usize| {
            let (ptr, bytes) = (distant[nth].as_mut_ptr(), distant[nth].len());
            let id =
                b.register(NonNull::new(ptr).unwrap(), bytes, Access::RemoteReadWrite).unwrap();
            b.describe(id).unwrap()
        });
        (local, remotes)
    };
    // The fabric never gave out this key.
    let is_bad = |nth: usize| nth % 7 == 3;
    let target = |nth: usize| usize::from(nth >= NUM / 2);
    for nth in 0..NUM {
        let mut region = remotes[target(nth)];
        if is_bad(nth) {
            region.key ^= 1 << 40;
        }
        let offset = (nth * RANGE) as u64;
        // Of different lengths, down to nothing.
        let bytes = (RANGE - nth % 8 * RANGE / 7) as u64;
        let src = LocalSegment { region: local, offset, bytes };
        // SAFETY: no thread writes the source.
        let posted = unsafe {
            a.write(a_id, RemoteSegment { region, offset }, src, Token(nth as u64)).unwrap()
        };
        assert_eq!(posted, PostOutcome::Accepted);
    }
    let mut done = Vec::new();
    while !a.may_sleep() {
        a.poll(&mut done);
    }
    assert_eq!(done.len(), NUM);
    for (nth, completion) in done.iter().enumerate() {
        assert_eq!(completion.token, Token(nth as u64), "in order");
        assert_eq!(completion.result.is_err(), is_bad(nth), "{completion:?}");
        let range = nth * RANGE..(nth + 1) * RANGE;
        let bytes = if is_bad(nth) { 0 } else { RANGE - nth % 8 * RANGE / 7 };
        let found = &distant[target(nth)][range.clone()];
        assert!(found[..bytes] == near[range][..bytes], "range {nth}");
        assert!(found[bytes..].iter().all(|&byte| byte == 0xa5), "behind range {nth}");
        assert!(distant[1 - target(nth)][nth * RANGE..][..RANGE].iter().all(|&b| b == 0xa5));
    }
}

/// A stopped peer must not block the engine's thread.
#[test]
fn memory_that_a_stopped_peer_copies_stays_registered_without_blocking() {
    let ((mut a, _), (mut b, b_id)) = pair();
    let (memory, near) = (Region::anonymous(8192).unwrap(), Region::anonymous(8192).unwrap());
    // SAFETY: the memory outlives both fabrics' last copies.
    let (held, other, local) = unsafe {
        let held = a.register(memory.as_ptr(), 8192, Access::RemoteReadWrite).unwrap();
        let other = a.register(memory.as_ptr(), 4096, Access::RemoteReadWrite).unwrap();
        (held, other, b.register(near.as_ptr(), 8192, Access::Local).unwrap())
    };
    let region = a.describe(held).unwrap();
    let place = b.find("announce", b_id).unwrap();
    let busy = b.table.announce(place, Copier::Engine, region.key);
    let begin = Instant::now();
    for _ in 0..100 {
        let error = a.deregister(held).unwrap_err().to_string();
        assert!(error.contains("in the middle of a copy"), "{error}");
    }
    a.deregister(other).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    drop(busy);
    // The first attempt has revoked the key.
    let src = LocalSegment { region: local, offset: 0, bytes: 10 };
    // SAFETY: no thread writes the source.
    let posted = unsafe { b.write(b_id, RemoteSegment { region, offset: 0 }, src, Token(1)) };
    assert_eq!(posted.unwrap(), PostOutcome::Accepted);
    let done = all_of(&mut b);
    assert!(done.len() == 1 && done[0].result.is_err(), "{done:?}");
    a.deregister(held).unwrap();
    assert!(a.deregister(held).is_err() && a.describe(held).is_none());
}

/// All completions of operations under way, in their order.
fn all_of(fabric: &mut CmaFabric) -> Vec<Completion> {
    let mut done = Vec::new();
    while !fabric.may_sleep() {
        fabric.poll(&mut done);
    }
    done
}

/// Distance of ranges, so that each has pages of its own, whatever their size.
const STRIDE: usize = 64 << 10;
const RANGE: u64 = 4096;
/// Index of the range that is not mapped.
const HOLE: usize = MAX_BATCH / 2 - 1;

/// The other process of the tests below. Its argument is the other side's detail, in hexadecimal.
pub(crate) fn peer_process() {
    let hex = std::env::args().nth(1).expect("the other side's detail");
    let mut fabric = CmaFabric::new().unwrap();
    let (id, detail) = fabric.open_peer().unwrap();
    fabric.join_peer(id, &hex::decode(&hex)).unwrap();
    let memory = Region::anonymous(MAX_BATCH * STRIDE).unwrap();
    // SAFETY: this side never touches it, and it outlives the fabric's last copy. The hole is one for
    // peers only, as in a process that breaks the promise that memory stays mapped.
    let region = unsafe {
        let id = fabric.register(memory.as_ptr(), memory.len(), Access::RemoteReadWrite).unwrap();
        let hole = memory.as_ptr().add(HOLE * STRIDE).as_ptr();
        rustix::mm::mprotect(hole.cast(), STRIDE, rustix::mm::MprotectFlags::empty()).unwrap();
        fabric.describe(id).unwrap()
    };
    let WireRegion { address, bytes, key } = region;
    println!("peer: {} {address} {bytes} {key}", hex::encode(&detail));
    // Runs until the other side has ended, with a time limit.
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(std::io::stdin().read_to_end(&mut Vec::new()).is_ok()));
    receiver.recv_timeout(Duration::from_secs(60)).expect("the end of the test");
}

/// A process with registered memory, except for one range that it has made inaccessible.
struct PeerProcess {
    child: Child,
    fabric: CmaFabric,
    id: PeerId,
    region: WireRegion,
}

impl PeerProcess {
    fn start() -> Self {
        let mut fabric = CmaFabric::new().unwrap();
        let (id, detail) = fabric.open_peer().unwrap();
        let mut child = child::command("cma-peer")
            .arg(hex::encode(&detail))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, found)) = line.split_once("peer: ") {
                    let _ = sender.send(found.to_owned());
                }
            }
        });
        let line = receiver.recv_timeout(Duration::from_secs(60)).expect("the other process");
        let mut words = line.split(' ');
        fabric.join_peer(id, &hex::decode(words.next().unwrap())).unwrap();
        let [address, bytes, key] = [(); 3].map(|()| words.next().unwrap().parse().unwrap());
        Self { child, fabric, id, region: WireRegion { address, bytes, key } }
    }

    /// Posts an operation on the range with index `nth` of the process.
    fn post(&mut self, is_write: bool, local: LocalSegment, nth: usize, token: u64) {
        let remote = RemoteSegment { region: self.region, offset: (nth * STRIDE) as u64 };
        // SAFETY: no thread touches the local memory before all operations have ended.
        let posted = unsafe {
            match is_write {
                true => self.fabric.write(self.id, remote, local, Token(token)),
                false => self.fabric.read(self.id, local, remote, Token(token)),
            }
        };
        assert_eq!(posted.unwrap(), PostOutcome::Accepted);
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes as an argument of a process.
mod hex {
    pub(super) fn encode(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn decode(hex: &str) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect()
    }
}

/// One system call copies all ranges and stops at the inaccessible one. That operation fails, and no other.
#[test]
fn memory_that_is_not_there_fails_its_own_operation_only() {
    let mut peer = PeerProcess::start();
    let all = MAX_BATCH * RANGE as usize;
    let near = Region::anonymous(2 * all).unwrap();
    let sent: Vec<u8> = (0..all).map(|nth| (nth * 7 + nth / 251) as u8).collect();
    // SAFETY: the memory outlives the fabric's last copy, and nothing copies it meanwhile.
    let local = unsafe {
        std::ptr::copy_nonoverlapping(sent.as_ptr(), near.as_ptr().as_ptr(), all);
        peer.fabric.register(near.as_ptr(), 2 * all, Access::Local).unwrap()
    };
    for is_write in [true, false] {
        for nth in 0..MAX_BATCH {
            let first = if is_write { 0 } else { all as u64 };
            let offset = first + nth as u64 * RANGE;
            let segment = LocalSegment { region: local, offset, bytes: RANGE };
            peer.post(is_write, segment, nth, nth as u64);
        }
        let done = all_of(&mut peer.fabric);
        assert_eq!(done.len(), MAX_BATCH);
        for (nth, Completion { token, result }) in done.into_iter().enumerate() {
            assert_eq!(token, Token(nth as u64), "in order");
            match result {
                Ok(()) => assert_ne!(nth, HOLE, "nothing is there"),
                Err(PostError::Transport { code, .. }) => {
                    assert_eq!((nth, code), (HOLE, i64::from(libc::EFAULT)));
                }
                Err(error) => panic!("operation {nth}: {error}"),
            }
        }
    }
    let mut found = vec![0; all];
    // SAFETY: no copy is under way any more.
    unsafe {
        let back = near.as_ptr().as_ptr().add(all);
        std::ptr::copy_nonoverlapping(back, found.as_mut_ptr(), all);
    }
    let hole = HOLE * RANGE as usize..(HOLE + 1) * RANGE as usize;
    assert!(found[hole.clone()].iter().all(|&byte| byte == 0));
    assert!(found[..hole.start] == sent[..hole.start] && found[hole.end..] == sent[hole.end..]);
}

/// A range without bytes copies nothing, so it cannot fail, neither by itself nor by the operation behind it.
#[test]
fn a_range_without_bytes_is_done_whatever_comes_behind_it() {
    let mut peer = PeerProcess::start();
    let near = Region::anonymous(RANGE as usize).unwrap();
    // SAFETY: the memory outlives the fabric's last copy.
    let local = unsafe { peer.fabric.register(near.as_ptr(), near.len(), Access::Local).unwrap() };
    // Indices of ranges, and bytes of each.
    let ranges = [
        (HOLE, 0),
        (HOLE, RANGE),
        (HOLE, 0),
        (HOLE, 0),
        (HOLE + 1, RANGE),
        (HOLE + 2, 0),
        (HOLE, RANGE),
    ];
    for is_write in [true, false] {
        for (token, (nth, bytes)) in ranges.into_iter().enumerate() {
            let segment = LocalSegment { region: local, offset: 0, bytes };
            peer.post(is_write, segment, nth, token as u64);
        }
        let done = all_of(&mut peer.fabric);
        assert_eq!(done.len(), ranges.len());
        for (Completion { token, result }, (at, range)) in
            done.into_iter().zip(ranges.into_iter().enumerate())
        {
            assert_eq!(token, Token(at as u64), "in order");
            assert_eq!(result.is_err(), range == (HOLE, RANGE), "{at} {range:?}: {result:?}");
        }
    }
}
