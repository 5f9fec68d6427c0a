//! Stand-in for the CUDA driver, or for GPUs in software, in a build without: types that have no values.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::checksum::ChecksumParams;
use super::layer::MapShape;
use super::{Conversion, GpuError, Piece, Reach};
use crate::abi::DevicePtr;
use crate::plan::LaunchPlan;

#[derive(Debug, Clone)]
pub(super) enum Gpu {}

#[derive(Debug)]
pub(super) enum Memory {}

#[derive(Debug)]
pub(super) enum Stream {}

#[derive(Debug)]
pub(super) enum Event {}

#[derive(Debug)]
pub(super) enum Graph {}

impl Gpu {
    pub(super) const fn open(_ordinal: u32) -> Result<Self, GpuError> {
        Err(GpuError::NotBuilt)
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) const fn count() -> Result<u32, GpuError> {
        Err(GpuError::NotBuilt)
    }

    pub(super) const fn ordinal(&self) -> u32 {
        match *self {}
    }

    pub(super) const fn pci_address(&self) -> Option<String> {
        match *self {}
    }

    pub(super) const fn alloc(&self, _bytes: u64) -> Result<Memory, GpuError> {
        match *self {}
    }

    pub(super) const fn alloc_shared(&self, _bytes: u64) -> Result<Memory, GpuError> {
        match *self {}
    }

    pub(super) fn import_shared(&self, _memory: OwnedFd, _bytes: u64) -> Result<Memory, GpuError> {
        match *self {}
    }

    pub(super) const fn alloc_host(&self, _bytes: u64) -> Result<Memory, GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn register_host(
        &self,
        _pages: NonNull<u8>,
        _bytes: u64,
        _is_register: bool,
    ) -> Result<Memory, GpuError> {
        match *self {}
    }

    pub(super) const fn stream(&self) -> Result<Stream, GpuError> {
        match *self {}
    }

    pub(super) const fn wrap_stream(&self, _raw: u64) -> Result<Stream, GpuError> {
        match *self {}
    }

    pub(super) const fn event(&self) -> Result<Event, GpuError> {
        match *self {}
    }

    pub(super) const fn orders_writes_of_nics(&self) -> Result<bool, GpuError> {
        match *self {}
    }

    pub(super) const fn free_bytes(&self) -> Result<u64, GpuError> {
        match *self {}
    }

    pub(super) const fn tensor_map(
        &self,
        _base: DevicePtr,
        _dtype: u32,
        _shape: &MapShape,
    ) -> Result<[u64; 16], GpuError> {
        match *self {}
    }

    pub(super) const fn reach(&self, _address: DevicePtr, _num_bytes: u64) -> Reach {
        match *self {}
    }
}

impl Memory {
    pub(super) const fn ptr(&self) -> DevicePtr {
        match *self {}
    }

    pub(super) const fn len(&self) -> u64 {
        match *self {}
    }

    pub(super) const fn host(&self) -> Option<NonNull<u8>> {
        match *self {}
    }

    pub(super) const fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        match *self {}
    }

    pub(super) const fn export(&self) -> Result<OwnedFd, GpuError> {
        match *self {}
    }
}

impl Stream {
    pub(super) const unsafe fn copy(
        &self,
        _to: DevicePtr,
        _from: DevicePtr,
        _bytes: u64,
    ) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn fill(
        &self,
        _to: DevicePtr,
        _value: u8,
        _bytes: u64,
    ) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn add_flag(
        &self,
        _flag: DevicePtr,
        _value: u64,
    ) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn tell(
        &self,
        _first: &Piece,
        _last: &Piece,
        _began_to: DevicePtr,
    ) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn convert(&self, _pieces: &[Conversion]) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const unsafe fn checksum(&self, _params: &ChecksumParams) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) fn then(&self, _action: Box<dyn FnOnce() + Send>) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn ordinal(&self) -> u32 {
        match *self {}
    }

    pub(super) const fn raw(&self) -> u64 {
        match *self {}
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) const unsafe fn launch(
        &self,
        _name: &'static str,
        _plan: &LaunchPlan,
        _params: &[u8],
    ) -> Result<(), GpuError> {
        match *self {}
    }

    #[cfg(not(feature = "emulated"))]
    pub(super) const unsafe fn launch_all(
        &self,
        _name: &'static str,
        _plans: &[LaunchPlan],
        _params: &[u8],
    ) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn is_capturing(&self) -> Result<bool, GpuError> {
        match *self {}
    }

    pub(super) const fn record(&self, _event: &Event) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn wait_for(&self, _event: &Event) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn wait(&self, _deadline: Instant) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn is_done(&self) -> Result<bool, GpuError> {
        match *self {}
    }

    pub(super) const fn begin_capture(&self) -> Result<(), GpuError> {
        match *self {}
    }

    pub(super) const fn end_capture(&self) -> Result<Graph, GpuError> {
        match *self {}
    }

    pub(super) const fn replay(&self, _graph: &Graph) -> Result<(), GpuError> {
        match *self {}
    }
}

impl Event {
    pub(super) const fn is_done(&self) -> Result<bool, GpuError> {
        match *self {}
    }

    pub(super) const fn since(&self, _earlier: &Self) -> Result<Duration, GpuError> {
        match *self {}
    }
}
