//! Weights whose memory is registered for reading by peers.

use std::ptr::NonNull;
use std::sync::Arc;

use message_engine::{Access, Connection, DeregisterError, Engine, MemoryRegion};
use tokio::sync::OwnedSemaphorePermit;

use crate::compute::ExpertWeights;
use crate::peers::manifest::{self, Manifest, parts};
use crate::peers::wire;

/// The memory of one expert, registered for reading. Dropping it deregisters the memory and then frees the weights, so
/// it may block, see [`deregister`].
pub(super) struct Registered {
    engine: Arc<Engine>,
    manifest: Manifest,
    digest: [u8; 32],
    /// One for each part; `None` for an empty part.
    regions: Vec<Option<MemoryRegion>>,
    weights: Arc<ExpertWeights>,
    /// For a copy of a device's expert.
    permit: Option<OwnedSemaphorePermit>,
}

impl Registered {
    /// Registers the memory of `weights`, those of `(layer, expert)`, and computes their digest if it is not known.
    /// Blocks while it does so.
    ///
    /// # Errors
    /// A text that says why the engine refused.
    pub(super) fn new(
        engine: Arc<Engine>,
        (layer, expert): (u32, u32),
        weights: Arc<ExpertWeights>,
        digest: Option<[u8; 32]>,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<Arc<Self>, String> {
        let manifest = Manifest::of(&weights);
        let digest =
            digest.unwrap_or_else(|| manifest::digest(layer, expert, &manifest, &parts(&weights)));
        // Holds the weights from the first registration on.
        let mut registered =
            Self { engine, manifest, digest, regions: Vec::new(), weights, permit };
        for part in parts(&registered.weights) {
            let region = if part.is_empty() {
                None
            } else {
                let first = NonNull::from(part).cast();
                // SAFETY: the part is readable memory of `registered.weights`, which `registered` holds until `drop`
                // has deregistered it, or for ever. Peers can only read it, and this process never writes it.
                let region =
                    unsafe { registered.engine.reg(first, part.len(), Access::RemoteRead) };
                Some(region.map_err(|error| error.to_string())?)
            };
            registered.regions.push(region);
        }
        Ok(Arc::new(registered))
    }

    pub(super) fn weights(&self) -> &Arc<ExpertWeights> {
        &self.weights
    }

    /// Returns true for a copy of a device's expert.
    pub(super) const fn is_copy(&self) -> bool {
        self.permit.is_some()
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Descriptors of the parts for the peer of `connection`, as on the wire.
    ///
    /// # Errors
    /// A text that says why the connection cannot reach the memory.
    pub(super) fn describe(&self, connection: &Connection) -> Result<Vec<String>, String> {
        let describe = |region: &Option<MemoryRegion>| match region {
            None => Ok(String::new()),
            Some(region) => {
                let descriptor = connection.advertise(&region.whole());
                Ok(wire::hex(&descriptor.map_err(|error| error.to_string())?.to_bytes()))
            }
        };
        self.regions.iter().map(describe).collect()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for region in self.regions.drain(..).flatten() {
            if let Err(reason) = deregister(&self.engine, region) {
                tracing::error!(reason, "weights that a peer reads are never freed");
                std::mem::forget(Arc::clone(&self.weights));
            }
        }
    }
}

/// Deregisters memory. Blocks up to [`ATTEMPTS`] seconds for a peer that copies.
///
/// # Errors
/// A text that says why the memory may still be in use.
fn deregister(engine: &Engine, mut region: MemoryRegion) -> Result<(), String> {
    let mut attempt = 1;
    loop {
        match engine.dereg(region) {
            Ok(_) => return Ok(()),
            Err(DeregisterError { region: Some(left), .. }) if attempt < ATTEMPTS => {
                region = left;
                attempt += 1;
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Attempts to deregister memory before its weights are kept for ever. Each waits a second for a peer that copies.
const ATTEMPTS: u32 = 5;
