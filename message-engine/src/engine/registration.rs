//! Memory that an engine is given, and gives back.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Engine;
use super::error::{DeregisterError, RegisterError, WaitError};
use super::mailbox::Mailbox;
use super::memory::{Handle, MemoryRegion, Source};
use super::shared::{Command, Register};
use crate::fabric::{Access, DmaBuf};
use p2p_core::region::Region;

impl Engine {
    /// Zeroed memory of the engine's own, registered. Committed page by page when touched, and freed
    /// when the last handle is dropped and no transfer uses it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn alloc(&self, bytes: usize, access: Access) -> Result<MemoryRegion, RegisterError> {
        let refused = |detail: String| RegisterError::Refused { bytes: bytes as u64, detail };
        let memory = Region::anonymous(bytes).map_err(|error| refused(error.to_string()))?;
        // SAFETY: the registration holds the memory, and the engine deregisters before it lets go.
        unsafe { self.register(memory.as_ptr(), bytes, access, Source::Own(memory.clone())) }
    }

    /// Registers memory. A range within one that is registered with the same rights shares its keys.
    ///
    /// # Safety
    /// This processor can read `ptr..ptr+bytes`, and write it where anything is to be received, read or
    /// written into it; see [`reg_device`](Self::reg_device) for memory of a GPU. It stays mapped until
    /// [`dereg`](Self::dereg) of every region made of it has succeeded, or the engine has
    /// [stopped](Self::stop); dropping it does the same without saying whether. Nothing holds references
    /// to it while transfers use it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn reg(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.register(ptr, bytes, access, Source::Host) }
    }

    /// Registers memory of another device, such as a GPU, with the transports that reach it: over
    /// `verbs` by its dma-buf if it has one and this host can, else by its address, which needs a
    /// peer-memory module of the device's driver. The descriptor is not needed any more afterwards.
    ///
    /// Such memory is for one-sided transfers, for messages to be sent, and for messages to be received
    /// that are announced: an engine that receives into it sets
    /// [`eager_bytes`](super::EngineConfig::eager_bytes) to 0, because a short message that came ahead would
    /// have to be copied by this processor.
    ///
    /// # Safety
    /// As for [`reg`](Self::reg), but that the device reads and writes instead of this processor;
    /// `ptr..ptr+bytes` is memory of the device in this process's addresses, and what the dma-buf stands
    /// for from its offset on.
    ///
    /// # Errors
    /// [`RegisterError`], which names every transport with its reason when none reaches the memory.
    pub unsafe fn reg_device(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<MemoryRegion, RegisterError> {
        let own = |DmaBuf { fd, offset }: DmaBuf<'_>| Ok((fd.try_clone_to_owned()?, offset));
        let refused = |error: std::io::Error| RegisterError::Refused {
            bytes: bytes as u64,
            detail: format!("the dma-buf's descriptor: {error}"),
        };
        let dma_buf = dma_buf.map(own).transpose().map_err(refused)?;
        // SAFETY: the caller's promise.
        unsafe { self.register(ptr, bytes, access, Source::Device(dma_buf)) }
    }

    /// Registers several ranges, all or none.
    ///
    /// # Safety
    /// As for [`reg`](Self::reg), for each.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn regv(
        &self,
        ranges: &[(NonNull<u8>, usize)],
        access: Access,
    ) -> Result<Vec<MemoryRegion>, RegisterError> {
        let register = |(ptr, bytes): &(NonNull<u8>, usize)| {
            // SAFETY: the caller's promise.
            unsafe { self.register(*ptr, *bytes, access, Source::Host) }
        };
        let mut regions = Vec::with_capacity(ranges.len());
        for range in ranges {
            match register(range) {
                Ok(region) => regions.push(region),
                Err(error) => {
                    // None: the caller may unmap all of it now, so no key may be left in force.
                    let left = regions.into_iter().filter_map(|region| self.dereg(region).err());
                    return Err(match left.last() {
                        None => error,
                        Some(left) => RegisterError::Refused {
                            bytes: range.1 as u64,
                            detail: format!(
                                "{error}; and what was registered before stays so: {left}"
                            ),
                        },
                    });
                }
            }
        }
        Ok(regions)
    }

    /// Takes memory back. True: its keys are revoked, no peer reaches it any more. False: another region
    /// that covers the same range keeps the keys in force.
    ///
    /// # Errors
    /// [`DeregisterError`] with the region while clones, spans or transfers use it, or when a transport
    /// cannot confirm that peers have let go. The memory must stay mapped then.
    pub fn dereg(&self, region: MemoryRegion) -> Result<bool, DeregisterError> {
        let failed = |detail: String, region| Err(DeregisterError { detail, region });
        if !Arc::ptr_eq(&region.inner.shared, &self.shared) {
            return failed("it is registered with another engine".to_owned(), Some(region));
        }
        let handle = match Arc::try_unwrap(region.inner) {
            Ok(handle) => handle,
            Err(inner) => {
                let detail = "clones, spans or transfers use it".to_owned();
                return failed(detail, Some(MemoryRegion { inner }));
            }
        };
        let reply = Arc::new(Mailbox::default());
        let (idx, is_full) = (handle.keys.idx, handle.is_full());
        let command = Command::Release { idx, is_full, reply: Arc::clone(&reply) };
        let deadline = Instant::now() + self.shared.command_timeout;
        let back = |handle| Some(MemoryRegion { inner: Arc::new(handle) });
        if self.shared.push_until(command, deadline).is_err() {
            return failed("the engine is too busy".to_owned(), back(handle));
        }
        let answer = match reply.pop(deadline) {
            // One that comes later goes nowhere: the thread keeps the handle then.
            Err(WaitError::Deadline) => reply.close_and_pop().ok_or(WaitError::Deadline),
            answer => answer,
        };
        match answer {
            Ok(Ok(is_revoked)) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(is_revoked)
            }
            Ok(Err(detail)) => failed(detail, back(handle)),
            // The thread is gone, and the fabrics with it.
            Err(WaitError::Stopped) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(true)
            }
            Err(WaitError::Deadline) => {
                // The command will still be carried out.
                handle.is_returned.store(true, Ordering::Release);
                let detail = "the engine did not answer in time; it takes the memory back as soon as it \
                              can, and until it has stopped nobody can say whether it has";
                failed(detail.to_owned(), None)
            }
        }
    }

    /// # Safety
    /// As for [`reg`](Self::reg), unless `source` holds it.
    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        source: Source,
    ) -> Result<MemoryRegion, RegisterError> {
        let reply = Arc::new(Mailbox::default());
        let register = Register { ptr, bytes, access, source, reply: Arc::clone(&reply) };
        let limit = self.shared.command_timeout;
        let deadline = Instant::now() + limit;
        let late = || RegisterError::Timeout { bytes: bytes as u64, limit_s: limit.as_secs() };
        let pushed = self.shared.push_until(Command::Register(register), deadline);
        pushed.map_err(|_| late())?;
        let answer = match reply.pop(deadline) {
            Ok(answer) => answer,
            Err(WaitError::Stopped) => return Err(RegisterError::Stopped),
            // An answer that comes later is taken back by the thread.
            Err(WaitError::Deadline) => reply.close_and_pop().ok_or_else(late)?,
        };
        let refused = |detail| RegisterError::Refused { bytes: bytes as u64, detail };
        let keys = answer.map_err(refused)?;
        let handle = Handle::new(Arc::clone(&self.shared), keys, ptr, bytes as u64);
        Ok(MemoryRegion { inner: Arc::new(handle) })
    }
}
