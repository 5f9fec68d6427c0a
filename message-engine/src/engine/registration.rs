//! Registration of memory with an engine, and its end.

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
    /// Allocates and registers zeroed memory of `bytes` bytes. The system commits a page when it is first touched. The
    /// memory is freed when the last handle is dropped and no transfer uses it.
    ///
    /// Blocks for at most [`stuck_timeout`](super::EngineConfig::stuck_timeout).
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::start(EngineConfig::local())?;
    /// let memory = engine.alloc(4096, Access::RemoteReadWrite)?;
    /// memory.copy_in(100, b"hello")?;
    /// let mut bytes = [0; 6];
    /// memory.copy_out(100, &mut bytes)?;
    /// assert_eq!(&bytes, b"hello\0");
    /// // The keys are revoked: no peer can reach the memory any more.
    /// assert!(engine.dereg(memory)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn alloc(&self, bytes: usize, access: Access) -> Result<MemoryRegion, RegisterError> {
        let refused = |detail: String| RegisterError::Refused { bytes: bytes as u64, detail };
        let memory = Region::anonymous(bytes).map_err(|error| refused(error.to_string()))?;
        // SAFETY: the registration holds the memory, and the engine deregisters before it drops the memory.
        unsafe { self.register(memory.as_ptr(), bytes, access, Source::Own(memory.clone())) }
    }

    /// Registers memory. A range inside an existing registration with the same rights shares its keys.
    ///
    /// # Safety
    /// - This processor can read `ptr..ptr+bytes`. It can write the parts that transfers or peers write. See
    ///   [`reg_device`](Self::reg_device) for memory of a GPU.
    /// - The memory stays mapped until [`dereg`](Self::dereg) has succeeded for every region made of it, or the engine
    ///   has [stopped](Self::stop). A dropped region is deregistered too, but the caller does not learn when.
    /// - Nothing holds references to the memory while transfers use it.
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

    /// Registers memory of another device, such as a GPU, with the transports that reach it.
    ///
    /// `verbs` uses the dma-buf if there is one and this host supports it. Otherwise it uses the address, which needs a
    /// peer-memory module of the device's driver. The caller may close the dma-buf's descriptor afterwards.
    ///
    /// Such memory serves one-sided transfers, sent messages, and received messages that were announced. An engine that
    /// receives into it sets [`eager_bytes`](super::EngineConfig::eager_bytes) to 0: this processor would have to copy
    /// a short message that arrives before its receive.
    ///
    /// # Safety
    /// As for [`reg`](Self::reg), but the device reads and writes instead of this processor. `ptr..ptr+bytes` is memory
    /// of the device in this process's addresses. It is the memory that the dma-buf contains from its offset on.
    ///
    /// # Errors
    /// [`RegisterError`]. If no transport reaches the memory, it names each of them with its reason.
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
    /// As for [`reg`](Self::reg), for each range.
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
                    // The caller may unmap all of the ranges after an error, so no key may stay in force.
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

    /// Deregisters memory. Returns true if its keys are revoked, so that no peer can reach it. Returns false if another
    /// region of the same registration keeps the keys in force.
    ///
    /// Blocks for at most [`stuck_timeout`](super::EngineConfig::stuck_timeout). A peer in the middle of a copy gets a
    /// second to end it.
    ///
    /// # Errors
    /// [`DeregisterError`] with the region while clones, spans or transfers use it, or if a transport cannot confirm
    /// that peers have stopped using it. The memory must stay mapped then.
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
            // The closed mailbox refuses a later answer, and the thread keeps the handle then.
            Err(WaitError::Deadline) => reply.close_and_pop().ok_or(WaitError::Deadline),
            answer => answer,
        };
        match answer {
            Ok(Ok(is_revoked)) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(is_revoked)
            }
            Ok(Err(detail)) => failed(detail, back(handle)),
            // The thread has ended and has dropped the fabrics.
            Err(WaitError::Stopped) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(true)
            }
            Err(WaitError::Deadline) => {
                // The thread still executes the command.
                handle.is_returned.store(true, Ordering::Release);
                let detail = "the engine did not answer in time; it deregisters the memory as soon as it can, and \
                              until it has stopped it is unknown whether it has";
                failed(detail.to_owned(), None)
            }
        }
    }

    /// Has the thread register memory, and waits for the keys.
    ///
    /// # Safety
    /// As for [`reg`](Self::reg), unless `source` holds the memory.
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
            // The closed mailbox refuses a later answer, and the thread deregisters the memory then.
            Err(WaitError::Deadline) => reply.close_and_pop().ok_or_else(late)?,
        };
        let refused = |detail| RegisterError::Refused { bytes: bytes as u64, detail };
        let keys = answer.map_err(refused)?;
        let handle = Handle::new(Arc::clone(&self.shared), keys, ptr, bytes as u64);
        Ok(MemoryRegion { inner: Arc::new(handle) })
    }
}
