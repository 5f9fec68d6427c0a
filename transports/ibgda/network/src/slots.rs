//! Handles of a joined peer for kernels and the host.

use std::sync::{Arc, Mutex, PoisonError};

use ibgda::{GpuMemory, Peer, Waits};
use kernels::abi::{DevicePtr, Link};
use kernels::gpu::GpuBuffer;
use kernels::slots::{KernelWaits, PathError, RemoteSlots};
use p2p_core::PostError;

use crate::endpoint::HostHealth;
use crate::heartbeat::HeartbeatQueue;

/// Fields go in order: queues before the memory that the NIC reads and writes for them.
#[derive(Debug)]
pub(crate) struct Slots {
    heartbeat: Mutex<HeartbeatQueue>,
    peer: Peer,
    link: Link,
    host: HostHealth,
    waits: Arc<GpuBuffer>,
    own: GpuMemory,
}

impl Slots {
    /// Kernels wait for the queues for at most `timeout`, or until the first word of `waits` ends their wait.
    pub(crate) fn new(
        mut peer: Peer,
        heartbeat: HeartbeatQueue,
        host: HostHealth,
        (waits, timeout): (Arc<GpuBuffer>, std::time::Duration),
        own: GpuMemory,
    ) -> Result<Self, ibgda::LinkError> {
        // The queue itself names the failed request.
        let error = DevicePtr::NULL;
        let link = peer.link(Waits { error, abort_mask: waits.ptr(), timeout })?;
        Ok(Self { heartbeat: Mutex::new(heartbeat), peer, link, host, waits, own })
    }

    /// The reason why one of the kernels' queues is out of service.
    fn check_queues(&self) -> Result<(), PostError> {
        const OP: &str = "health";
        for queue in self.peer.queues() {
            let failed = |code, detail: String| {
                let detail = format!("queue pair {:#x}: {detail}", queue.qpn());
                Err(PostError::Transport { op: OP, code, detail })
            };
            match queue.error() {
                Ok(0) => {}
                Ok(word) => return failed((word >> 8 & 0xff) as i64, describe(word)),
                Err(error) => return failed(0, error.to_string()),
            }
        }
        Ok(())
    }
}

impl RemoteSlots for Slots {
    fn own(&self) -> &GpuBuffer {
        self.own.buffer()
    }

    fn link(&self) -> Link {
        self.link
    }

    fn waits(&self) -> KernelWaits {
        KernelWaits::new(Arc::clone(&self.waits))
    }

    fn show_life(&self, offset: u64) -> Result<(), PathError> {
        let mut heartbeat = self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner);
        heartbeat.add(offset).map_err(|error| PathError::new(&error))
    }

    fn health(&self) -> Result<(), PathError> {
        let heartbeat = || self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_queues()
            .and_then(|()| heartbeat().health("health"))
            .and_then(|()| self.host.check())
            .map_err(|error| PathError::new(&error))
    }
}

/// Decodes a kernel's report about a queue: `SY_MLX5_ERROR_*` of `comm/mlx5/queue.h`.
fn describe(word: u64) -> String {
    let [code, syndrome, vendor, opcode, low, high, ..] = word.to_le_bytes();
    match code {
        1 => "a wait of kernels reached its bound".to_owned(),
        2 => "the host ended the waits of kernels".to_owned(),
        3 => format!(
            "the NIC completed a request of kernels with an error: syndrome {syndrome:#04x}, vendor \
             {vendor:#04x}, opcode {opcode:#04x}, index {:#06x}",
            u16::from_le_bytes([low, high])
        ),
        4 => "the NIC completed what kernels did not post".to_owned(),
        5 => "kernels asked for what cannot be posted".to_owned(),
        code => format!("kernels left code {code}"),
    }
}
