//! Whether parameters can be used, decided before anything is launched. Mirrors `cuda/check.hpp`.

use thiserror::Error;

use crate::abi::{
    ClientPeer, CombineParams, DEVICE_ABI_VERSION, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr,
    DispatchParams, EchoParams, ExpertComputeParams, ExpertLists, ExpertRecvParams,
    ExpertSendParams, FrameGeometry, Link, MAX_EXPERTS, MAX_HIDDEN, MAX_PEERS, PATH_DIRECT,
    PATH_IBGDA, PATH_PROXY, RANK_BITS, ServerPeer,
};

/// Parameters that cannot be used. Nothing was launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[repr(i32)]
pub enum CheckError {
    /// `version` is another build's.
    #[error("parameters of another version: expected version {DEVICE_ABI_VERSION}")]
    Version = 1,
    /// A pointer that must be set is null.
    #[error("a required pointer is null")]
    Null = 2,
    /// A pointer is not aligned, or a size is not a multiple of the copy unit.
    #[error("a pointer is not aligned to 16 bytes, or a size is no multiple of them")]
    Alignment = 3,
    /// The hidden size cannot be used.
    #[error("hidden size: expected a positive multiple of 128, at most 1048576")]
    Hidden = 4,
    /// The number of experts per token cannot be used.
    #[error("top_k: expected 1 to 16")]
    TopK = 5,
    /// The element type cannot be used.
    #[error("dtype: expected bf16 or fp8-e4m3")]
    Dtype = 6,
    /// The number of peers cannot be used.
    #[error("number of peers: expected 1 to 32")]
    Peers = 7,
    /// The number of experts cannot be used.
    #[error("number of experts: expected 1 to 1024, with at most 7 replicas each")]
    Experts = 8,
    /// The number of tokens cannot be used.
    #[error("token capacity: expected at least 1 and at most the capacity of frames and lists")]
    Tokens = 9,
    /// The geometry was not made by [`FrameGeometry::new`].
    #[error("frame geometry: expected the result of `FrameGeometry::new`")]
    Geometry = 10,
    /// The path to a peer is not compiled in.
    #[error("link: an unknown path to a peer")]
    Path = 11,
    /// A wait would have no bound.
    #[error("timeout_ns is 0: every wait has a bound")]
    Bound = 12,
    /// The experts' intermediate size cannot be used.
    #[error("intermediate size: expected a positive multiple of 64, at most 1048576")]
    Inter = 14,
}

impl CheckError {
    /// The same as a `SY_LAUNCH_*` code.
    #[must_use]
    pub const fn code(self) -> i32 {
        self as i32
    }
}

/// Parameters of a kernel, which can be checked.
pub trait Check {
    /// Checks everything that can be checked without the GPU.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    fn check(&self) -> Result<(), CheckError>;
}

impl Check for DispatchParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.servers, self.num_servers)?;
        capacity(&self.geometry, self.capacity)?;
        if self.num_experts == 0 || self.num_experts as usize > MAX_EXPERTS {
            return Err(CheckError::Experts);
        }
        let vectors = [
            self.hidden_states,
            self.topk_idx,
            self.topk_weights,
            self.placement,
            self.state,
            self.handle,
        ];
        set(&vectors)?;
        set(&[self.num_tokens])?;
        aligned(&vectors)?;
        if !self.trace.is_null() && self.trace_len == 0 {
            return Err(CheckError::Null);
        }
        Ok(())
    }
}

impl Check for CombineParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.servers, self.num_servers)?;
        capacity(&self.geometry, self.capacity)?;
        bound(self.timeout_ns)?;
        set(&[self.handle, self.state, self.out])?;
        if !self.trace.is_null() && self.trace_len == 0 {
            return Err(CheckError::Null);
        }
        aligned(&[self.out, self.handle])
    }
}

impl Check for ExpertRecvParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.clients, self.num_clients)?;
        lists(&self.lists)?;
        bound(self.timeout_ns)?;
        if self.min_ready == 0 {
            return Err(CheckError::Peers);
        }
        // The lists must hold any one client's frame, and ranks within an expert must fit their bits.
        let max_rows = self.lists.max_rows;
        if max_rows < self.geometry.max_tokens
            || u64::from(max_rows) * u64::from(self.geometry.top_k) >= 1 << RANK_BITS
        {
            return Err(CheckError::Tokens);
        }
        if self.num_experts == 0
            || self.num_experts as usize > MAX_EXPERTS
            || self.num_local_experts == 0
            || self.num_local_experts > self.num_experts
        {
            return Err(CheckError::Experts);
        }
        set(&[self.state, self.local_expert])?;
        aligned(&[self.gather])
    }
}

impl Check for ExpertSendParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.clients, self.num_clients)?;
        lists(&self.lists)?;
        if self.max_rows == 0 || self.max_rows > self.lists.max_rows {
            return Err(CheckError::Tokens);
        }
        aligned(&[self.expert_out])
    }
}

impl Check for ExpertComputeParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.clients, self.num_clients)?;
        lists(&self.lists)?;
        if self.weights_dtype != DTYPE_BF16 && self.weights_dtype != DTYPE_F8_E4M3 {
            return Err(CheckError::Dtype);
        }
        if self.inter == 0 || !self.inter.is_multiple_of(64) || self.inter > MAX_HIDDEN {
            return Err(CheckError::Inter);
        }
        if self.num_local_experts == 0 || self.num_local_experts as usize > MAX_EXPERTS {
            return Err(CheckError::Experts);
        }
        let num_entries = u64::from(self.lists.max_rows) * u64::from(self.geometry.top_k);
        if num_entries >= 1 << RANK_BITS {
            return Err(CheckError::Tokens);
        }
        if self.timeout_ns == 0 {
            return Err(CheckError::Bound);
        }
        let pointers = [self.rows, self.activation, self.expert_out, self.layers];
        set(&pointers)?;
        if self.num_layers == 0 {
            return Err(CheckError::Null);
        }
        // The copy engine wants its maps at multiples of 64, and they stand in the table of layers.
        if !self.layers.0.is_multiple_of(64) {
            return Err(CheckError::Alignment);
        }
        aligned(&pointers)
    }
}

impl Check for EchoParams {
    fn check(&self) -> Result<(), CheckError> {
        common(self.version, &self.geometry, self.clients, self.num_clients)?;
        capacity(&self.geometry, self.capacity)?;
        bound(self.timeout_ns)?;
        set(&[self.state])
    }
}

/// Checks a table of servers before it is copied to the device.
///
/// # Errors
/// The first [`CheckError`] found.
pub fn check_servers(servers: &[ServerPeer]) -> Result<(), CheckError> {
    peers(servers.len())?;
    servers.iter().try_for_each(|server| {
        link(&server.request)?;
        set(&[server.response])?;
        aligned(&[server.response])
    })
}

/// Checks a table of clients before it is copied to the device.
///
/// # Errors
/// The first [`CheckError`] found.
pub fn check_clients(clients: &[ClientPeer]) -> Result<(), CheckError> {
    peers(clients.len())?;
    clients.iter().try_for_each(|client| {
        link(&client.response)?;
        set(&[client.request])?;
        aligned(&[client.request])
    })
}

fn common(
    version: u32,
    geometry: &FrameGeometry,
    table: DevicePtr,
    num_peers: u32,
) -> Result<(), CheckError> {
    if version != DEVICE_ABI_VERSION {
        return Err(CheckError::Version);
    }
    let g = geometry;
    let expected = FrameGeometry::new(g.hidden, g.top_k, g.dtype, g.max_tokens, g.num_frames)?;
    // Offsets in a header are 32 bits.
    if *geometry != expected || u32::try_from(geometry.payload_offset).is_err() {
        return Err(CheckError::Geometry);
    }
    peers(num_peers as usize)?;
    set(&[table])?;
    aligned(&[table])
}

fn lists(lists: &ExpertLists) -> Result<(), CheckError> {
    set(&[
        lists.batch,
        lists.expert_begin,
        lists.list_row,
        lists.list_weight,
        lists.row_source,
        lists.row_position,
    ])?;
    aligned(&[lists.row_position])?;
    if lists.max_rows == 0 { Err(CheckError::Tokens) } else { Ok(()) }
}

fn link(link: &Link) -> Result<(), CheckError> {
    if ![PATH_DIRECT, PATH_IBGDA, PATH_PROXY].contains(&link.path) {
        return Err(CheckError::Path);
    }
    set(&[link.window])?;
    if link.path != PATH_DIRECT {
        if link.context == 0 {
            return Err(CheckError::Null);
        }
        if !link.context.is_multiple_of(8) {
            return Err(CheckError::Alignment);
        }
    }
    aligned(&[link.window])
}

fn capacity(geometry: &FrameGeometry, capacity: u32) -> Result<(), CheckError> {
    if capacity == 0 || capacity > geometry.max_tokens {
        return Err(CheckError::Tokens);
    }
    Ok(())
}

fn bound(timeout_ns: u64) -> Result<(), CheckError> {
    if timeout_ns == 0 { Err(CheckError::Bound) } else { Ok(()) }
}

fn peers(num_peers: usize) -> Result<(), CheckError> {
    if num_peers == 0 || num_peers > MAX_PEERS { Err(CheckError::Peers) } else { Ok(()) }
}

fn set(pointers: &[DevicePtr]) -> Result<(), CheckError> {
    if pointers.iter().any(|p| p.is_null()) { Err(CheckError::Null) } else { Ok(()) }
}

fn aligned(pointers: &[DevicePtr]) -> Result<(), CheckError> {
    if pointers.iter().all(|p| p.0.is_multiple_of(16)) {
        Ok(())
    } else {
        Err(CheckError::Alignment)
    }
}
