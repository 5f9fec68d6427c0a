//! A port of an mlx5 NIC, opened for queues that a GPU posts on.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use thiserror::Error;

use crate::ffi::{
    self, AhAttributes, ContextAttributes, DvAh, DvObject, DvPd, GlobalRoute, InOut,
    PortAttributes, Umem, UmemIn,
};
use crate::library::{Libraries, LibraryError};
use crate::prm::{self, AtomicCapabilities, CapabilityKind, GeneralCapabilities, Refused};

/// Which NIC and how to use its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicConfig {
    /// Name, such as `mlx5_0`; `None` takes the first mlx5 device.
    pub device: Option<String>,
    /// Port, from 1.
    pub port: u8,
    /// Index of the address; `None` takes the first RoCE v2 address over IPv4, else over IPv6, and 0 on
    /// InfiniBand.
    pub gid_idx: Option<u8>,
    /// Differentiated services and congestion bits of packets.
    pub traffic_class: u8,
    /// Service level, or priority on Ethernet.
    pub service_level: u8,
    /// Below which `sys/class` is; `/` except in tests.
    pub root: PathBuf,
}

impl Default for NicConfig {
    fn default() -> Self {
        Self {
            device: None,
            port: 1,
            gid_idx: None,
            traffic_class: 0,
            service_level: 0,
            root: PathBuf::from("/"),
        }
    }
}

/// A NIC, memory or a queue could not be prepared.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NicError {
    /// A library is missing.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call of libibverbs or libmlx5 failed.
    #[error("{device}: {call} failed: {source}; {advice}")]
    Call {
        /// NIC.
        device: String,
        /// Function.
        call: &'static str,
        /// The system's answer.
        source: io::Error,
        /// What to look at.
        advice: &'static str,
    },
    /// The firmware refused a command.
    #[error("{device}: {source}")]
    Refused {
        /// NIC.
        device: String,
        /// What and why.
        source: Refused,
    },
    /// No such device.
    #[error("no mlx5 device{}: found {}; a ConnectX-5 or later with the driver mlx5_core is needed", wanted.as_ref().map(|name| format!(" `{name}`")).unwrap_or_default(), if found.is_empty() { "no RDMA device".to_owned() } else { found.join(", ") })]
    Absent {
        /// Name that was asked for.
        wanted: Option<String>,
        /// Devices of the host, with their drivers.
        found: Vec<String>,
    },
    /// The port cannot be used.
    #[error("{device} port {port}: {found}, expected {expected}")]
    Port {
        /// NIC.
        device: String,
        /// Port.
        port: u8,
        /// What was found.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// The device lacks something.
    #[error("{device} cannot do this: {what} is {found}, expected {expected}")]
    Capability {
        /// NIC.
        device: String,
        /// Which capability.
        what: &'static str,
        /// Value found.
        found: String,
        /// Value needed.
        expected: &'static str,
    },
    /// DevX commands are not allowed or not there.
    #[error(
        "{device}: DevX is not available ({detail}); queues in GPU memory need it: CAP_NET_RAW and firmware with UCTX_EN=1, or use the plain path"
    )]
    NoDevx {
        /// NIC.
        device: String,
        /// Why.
        detail: String,
    },
    /// Memory that the NIC cannot reach.
    #[error(
        "{device}: {bytes} bytes of GPU memory cannot be registered: by dma-buf: {dma_buf}; by address: {by_address}; load nvidia_peermem, or use the open kernel modules with Linux 5.12 or later"
    )]
    GpuMemory {
        /// NIC.
        device: String,
        /// Bytes.
        bytes: u64,
        /// How the first way failed.
        dma_buf: String,
        /// How the second way failed.
        by_address: io::Error,
    },
}

/// What a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v2.
    Ethernet,
}

/// How a region became known to the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisteredBy {
    /// Host memory.
    Host,
    /// GPU memory by a descriptor of its pages.
    DmaBuf,
    /// GPU memory by its address: the module `nvidia_peermem` is there.
    PeerMemory,
}

/// A port. Objects made from it keep it open.
#[derive(Debug)]
pub struct Nic {
    libraries: Libraries,
    name: String,
    context: NonNull<c_void>,
    pd: NonNull<c_void>,
    pdn: u32,
    devx: Result<DevxCapabilities, String>,
    port: Port,
}

/// Of a NIC that takes DevX commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevxCapabilities {
    /// General.
    pub general: GeneralCapabilities,
    /// Atomic.
    pub atomic: AtomicCapabilities,
}

/// The port's address and limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// Kind of link.
    pub link: LinkLayer,
    /// InfiniBand's local address.
    pub lid: u16,
    /// Global address.
    pub gid: [u8; 16],
    /// Index of the global address.
    pub gid_idx: u8,
    /// `IBV_MTU_*` in force.
    pub mtu: u8,
    /// As configured.
    pub traffic_class: u8,
    /// As configured.
    pub service_level: u8,
}

// SAFETY: libibverbs and libmlx5 allow calls on one context from any thread.
unsafe impl Send for Nic {}
// SAFETY: the same; nothing of this value changes after it was made.
unsafe impl Sync for Nic {}

impl Nic {
    /// Opens a port.
    ///
    /// # Errors
    /// [`NicError`], naming what is missing.
    pub fn open(libraries: &Libraries, config: &NicConfig) -> Result<Arc<Self>, NicError> {
        let (name, context, devx) = open_device(libraries, config)?;
        let closer = Closer { libraries, context };
        let port = query_port(libraries, context, &name, config)?;
        let failed = |call, advice| NicError::Call {
            device: name.clone(),
            call,
            source: io::Error::last_os_error(),
            advice,
        };
        // SAFETY: the context is open.
        let pd = unsafe { (libraries.verbs.ibv_alloc_pd)(context.as_ptr()) };
        let pd = NonNull::new(pd)
            .ok_or_else(|| failed("ibv_alloc_pd", "the limit of locked memory may be too low"))?;
        let mut dv = DvPd { pdn: 0, comp_mask: 0 };
        let mut object = no_object();
        object.pd = InOut { input: pd.as_ptr(), output: (&raw mut dv).cast() };
        // SAFETY: input and output are the objects that `OBJ_PD` says.
        let code = unsafe { (libraries.mlx5.mlx5dv_init_obj)(&raw mut object, ffi::OBJ_PD) };
        if code != 0 {
            let error = code_error(&name, "mlx5dv_init_obj", code, "libmlx5 is of another version");
            // SAFETY: made above, used by nobody.
            unsafe { (libraries.verbs.ibv_dealloc_pd)(pd.as_ptr()) };
            return Err(error);
        }
        std::mem::forget(closer);
        let mut nic = Self {
            libraries: libraries.clone(),
            name,
            context,
            pd,
            pdn: dv.pdn,
            devx: Err(String::new()),
            port,
        };
        nic.devx = match devx {
            Ok(()) => nic.query_devx().map_err(|error| error.to_string()),
            Err(reason) => Err(reason),
        };
        Ok(Arc::new(nic))
    }

    /// Name of the device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port's address and limits.
    #[must_use]
    pub const fn port(&self) -> &Port {
        &self.port
    }

    /// What DevX offers here.
    ///
    /// # Errors
    /// [`NicError::NoDevx`], [`NicError::Capability`].
    pub fn devx(&self) -> Result<DevxCapabilities, NicError> {
        let caps = match &self.devx {
            Ok(caps) => *caps,
            Err(detail) => {
                return Err(NicError::NoDevx { device: self.name.clone(), detail: detail.clone() });
            }
        };
        let lacks = |what, found: String, expected| NicError::Capability {
            device: self.name.clone(),
            what,
            found,
            expected,
        };
        if caps.general.cqe_version != 1 {
            return Err(lacks("cqe_version", caps.general.cqe_version.to_string(), "1"));
        }
        // Fetch-add and masked fetch-add, of 4 and 8 bytes.
        if caps.atomic.operations & 0b1010 != 0b1010 {
            let found = format!("{:#06x}", caps.atomic.operations);
            return Err(lacks(
                "atomic_operations",
                found,
                "fetch-add and masked fetch-add (0x000a)",
            ));
        }
        if caps.atomic.sizes_bytes & 0b1100 != 0b1100 {
            let found = format!("{:#06x}", caps.atomic.sizes_bytes);
            return Err(lacks("atomic_size_qp", found, "4 and 8 bytes (0x000c)"));
        }
        Ok(caps)
    }

    /// Registers host memory for this NIC and, by its remote key, for peers.
    ///
    /// # Safety
    /// The memory stays allocated as long as the result lives, and whoever else uses it expects that
    /// the NIC writes into it.
    ///
    /// # Errors
    /// [`NicError::Call`].
    pub unsafe fn register_host(
        self: &Arc<Self>,
        memory: NonNull<u8>,
        bytes: usize,
    ) -> Result<Registration, NicError> {
        // SAFETY: the caller keeps the memory.
        let mr = unsafe {
            (self.libraries.verbs.ibv_reg_mr)(
                self.pd.as_ptr(),
                memory.as_ptr().cast(),
                bytes,
                ALL_RIGHTS,
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| {
            self.last_error("ibv_reg_mr", "the limit of locked memory (ulimit -l) may be too low")
        })?;
        Ok(Registration { nic: Arc::clone(self), mr, by: RegisteredBy::Host })
    }

    /// Registers GPU memory: by dma-buf, then by its address. Never with relaxed ordering, since flags
    /// must not overtake what they announce.
    ///
    /// # Safety
    /// As [`register_host`](Self::register_host); `dma_buf` describes the memory, from `offset` on.
    ///
    /// # Errors
    /// [`NicError::GpuMemory`], saying how both ways failed.
    pub unsafe fn register_gpu(
        self: &Arc<Self>,
        address: u64,
        bytes: u64,
        dma_buf: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<Registration, NicError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut first = "the GPU's driver gives no descriptor".to_owned();
        if let Some((descriptor, offset)) = dma_buf {
            // SAFETY: the caller keeps the memory; the descriptor is open.
            let mr = unsafe {
                (self.libraries.verbs.ibv_reg_dmabuf_mr)(
                    self.pd.as_ptr(),
                    offset,
                    len,
                    address,
                    descriptor.as_raw_fd(),
                    ALL_RIGHTS,
                )
            };
            if let Some(mr) = NonNull::new(mr) {
                let by = RegisteredBy::DmaBuf;
                return Ok(Registration { nic: Arc::clone(self), mr, by });
            }
            first = io::Error::last_os_error().to_string();
            tracing::debug!(nic = self.name, error = first, "no registration by dma-buf");
        }
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the caller keeps the memory; the kernel asks the GPU's driver for its pages.
        let mr = unsafe {
            (self.libraries.verbs.ibv_reg_mr)(self.pd.as_ptr(), pointer, len, ALL_RIGHTS)
        };
        match NonNull::new(mr) {
            Some(mr) => {
                Ok(Registration { nic: Arc::clone(self), mr, by: RegisteredBy::PeerMemory })
            }
            None => Err(NicError::GpuMemory {
                device: self.name.clone(),
                bytes,
                dma_buf: first,
                by_address: io::Error::last_os_error(),
            }),
        }
    }

    /// Hardware address of the next hop towards `gid`, as the kernel resolves it.
    ///
    /// # Errors
    /// [`NicError::Call`] when there is no way.
    pub fn next_hop(&self, gid: &[u8; 16], lid: u16) -> Result<[u8; 6], NicError> {
        let mut attributes = self.path(gid, lid);
        let (verbs, mlx5) = (&self.libraries.verbs, &self.libraries.mlx5);
        // SAFETY: the domain is open, the attributes are complete.
        let ah = unsafe { (verbs.ibv_create_ah)(self.pd.as_ptr(), &raw mut attributes) };
        if ah.is_null() {
            let advice =
                "no way to the peer's address: check routes and ARP of the NIC's interface";
            return Err(self.last_error("ibv_create_ah", advice));
        }
        let mut dv = DvAh { av: ptr::null_mut(), comp_mask: 0 };
        let mut object = no_object();
        object.ah = InOut { input: ah, output: (&raw mut dv).cast() };
        // SAFETY: input and output are the objects that `OBJ_AH` says; the vector lives as long as the
        // handle.
        let (code, mac) = unsafe {
            let code = (mlx5.mlx5dv_init_obj)(&raw mut object, ffi::OBJ_AH);
            let mac = if code == 0 && !dv.av.is_null() { Some((*dv.av).rmac) } else { None };
            (verbs.ibv_destroy_ah)(ah);
            (code, mac)
        };
        mac.ok_or_else(|| {
            code_error(&self.name, "mlx5dv_init_obj", code, "libmlx5 is of another version")
        })
    }

    /// Attributes of the way to a peer, for verbs.
    pub(crate) fn path(&self, gid: &[u8; 16], lid: u16) -> AhAttributes {
        let port = &self.port;
        AhAttributes {
            grh: GlobalRoute {
                dgid: *gid,
                sgid_index: port.gid_idx,
                hop_limit: HOP_LIMIT,
                traffic_class: port.traffic_class,
                ..GlobalRoute::default()
            },
            dlid: lid,
            sl: port.service_level,
            is_global: u8::from(port.link == LinkLayer::Ethernet),
            port_num: port.number,
            ..AhAttributes::default()
        }
    }

    pub(crate) const fn libraries(&self) -> &Libraries {
        &self.libraries
    }

    pub(crate) const fn context(&self) -> *mut c_void {
        self.context.as_ptr()
    }

    pub(crate) const fn pd(&self) -> *mut c_void {
        self.pd.as_ptr()
    }

    pub(crate) const fn pdn(&self) -> u32 {
        self.pdn
    }

    /// The error of a call that left it in `errno`.
    pub(crate) fn last_error(&self, call: &'static str, advice: &'static str) -> NicError {
        NicError::Call {
            device: self.name.clone(),
            call,
            source: io::Error::last_os_error(),
            advice,
        }
    }

    /// The error of a call that returned it.
    pub(crate) fn code_error(
        &self,
        call: &'static str,
        code: c_int,
        advice: &'static str,
    ) -> NicError {
        code_error(&self.name, call, code, advice)
    }

    pub(crate) fn refused(&self, source: Refused) -> NicError {
        NicError::Refused { device: self.name.clone(), source }
    }

    /// Makes memory known to the firmware, for queues.
    ///
    /// # Safety
    /// The memory stays allocated as long as the result lives.
    pub(crate) unsafe fn register_umem(
        self: &Arc<Self>,
        address: u64,
        bytes: usize,
        dma_buf: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<UmemOwner, NicError> {
        let access = u32::try_from(ffi::ACCESS_LOCAL_WRITE).unwrap_or(1);
        let mlx5 = &self.libraries.mlx5;
        if let Some((descriptor, offset)) = dma_buf {
            let mut input = UmemIn {
                addr: ptr::with_exposed_provenance_mut(usize::try_from(offset).unwrap_or(0)),
                size: bytes,
                access,
                pgsz_bitmap: !4095,
                comp_mask: ffi::UMEM_MASK_DMABUF,
                dmabuf_fd: descriptor.as_raw_fd(),
            };
            // SAFETY: the caller keeps the memory; with the mask, `addr` is an offset.
            let umem = unsafe { (mlx5.mlx5dv_devx_umem_reg_ex)(self.context(), &raw mut input) };
            if let Some(umem) = NonNull::new(umem) {
                return Ok(UmemOwner { nic: Arc::clone(self), umem });
            }
            let error = io::Error::last_os_error();
            tracing::debug!(nic = self.name, %error, "no queue memory by dma-buf");
        }
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the caller keeps the memory.
        let umem = unsafe { (mlx5.mlx5dv_devx_umem_reg)(self.context(), pointer, bytes, access) };
        let umem = NonNull::new(umem).ok_or_else(|| {
            let advice = "memory of queues must be reachable by the NIC: nvidia_peermem or dma-buf";
            self.last_error("mlx5dv_devx_umem_reg", advice)
        })?;
        Ok(UmemOwner { nic: Arc::clone(self), umem })
    }

    /// Sends a command that makes nothing.
    pub(crate) fn command(
        &self,
        name: &'static str,
        command: &[u8],
        answer: &mut [u8],
    ) -> Result<(), NicError> {
        // SAFETY: both buffers have the lengths that are given.
        let code = unsafe {
            (self.libraries.mlx5.mlx5dv_devx_general_cmd)(
                self.context(),
                command.as_ptr().cast(),
                command.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        // The answer's own status says more than the code.
        prm::check(name, answer).map_err(|source| self.refused(source))?;
        if code != 0 {
            return Err(self.code_error("mlx5dv_devx_general_cmd", code, DEVX_ADVICE));
        }
        Ok(())
    }

    fn query_devx(&self) -> Result<DevxCapabilities, NicError> {
        let query = |kind| {
            let mut answer = [0; prm::CAPABILITY_BYTES];
            let command = prm::query_capabilities(kind);
            self.command("QUERY_HCA_CAP", &command, &mut answer).map(|()| answer)
        };
        Ok(DevxCapabilities {
            general: prm::general_capabilities(&query(CapabilityKind::General)?),
            atomic: prm::atomic_capabilities(&query(CapabilityKind::Atomic)?),
        })
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        // SAFETY: everything that was made from them holds a reference to this value, so is gone.
        unsafe {
            (self.libraries.verbs.ibv_dealloc_pd)(self.pd.as_ptr());
            (self.libraries.verbs.ibv_close_device)(self.context.as_ptr());
        }
    }
}

/// Memory that a NIC knows, until dropped.
#[derive(Debug)]
pub struct Registration {
    nic: Arc<Nic>,
    mr: NonNull<ffi::Mr>,
    by: RegisteredBy,
}

// SAFETY: the key may be used and given back by any thread.
unsafe impl Send for Registration {}
// SAFETY: the same; reading the keys changes nothing.
unsafe impl Sync for Registration {}

impl Registration {
    /// For requests of this side. Never leaves the process.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// For the one peer that may use the memory.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.mr.as_ref() }.rkey
    }

    /// How it was registered.
    #[must_use]
    pub const fn by(&self) -> RegisteredBy {
        self.by
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered once, given back once.
        let code = unsafe { (self.nic.libraries.verbs.ibv_dereg_mr)(self.mr.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            tracing::error!(nic = self.nic.name, %error, "a registration cannot be given back");
        }
    }
}

/// Memory that the firmware knows, until dropped.
#[derive(Debug)]
pub(crate) struct UmemOwner {
    nic: Arc<Nic>,
    umem: NonNull<Umem>,
}

// SAFETY: used by one owner at a time; the library has no tie to threads.
unsafe impl Send for UmemOwner {}

impl UmemOwner {
    pub(crate) fn id(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.umem.as_ref() }.umem_id
    }
}

impl Drop for UmemOwner {
    fn drop(&mut self) {
        // SAFETY: registered once, given back once.
        let code = unsafe { (self.nic.libraries.mlx5.mlx5dv_devx_umem_dereg)(self.umem.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            tracing::error!(nic = self.nic.name, %error, "queue memory cannot be given back");
        }
    }
}

/// Closes a context unless it was forgotten.
struct Closer<'a> {
    libraries: &'a Libraries,
    context: NonNull<c_void>,
}

impl Drop for Closer<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by whoever made this value, used by nobody else yet.
        unsafe { (self.libraries.verbs.ibv_close_device)(self.context.as_ptr()) };
    }
}

/// Finds and opens the device, with DevX if it can be had.
#[allow(clippy::type_complexity, reason = "what the one caller takes apart")]
fn open_device(
    libraries: &Libraries,
    config: &NicConfig,
) -> Result<(String, NonNull<c_void>, Result<(), String>), NicError> {
    let (verbs, mlx5) = (&libraries.verbs, &libraries.mlx5);
    let mut num_devices: c_int = 0;
    // SAFETY: a valid place for the number.
    let list = unsafe { (verbs.ibv_get_device_list)(&raw mut num_devices) };
    if list.is_null() {
        return Err(NicError::Call {
            device: "this host".to_owned(),
            call: "ibv_get_device_list",
            source: io::Error::last_os_error(),
            advice: "is the module ib_uverbs loaded?",
        });
    }
    let mut found = Vec::new();
    let mut opened = None;
    for idx in 0..usize::try_from(num_devices).unwrap_or(0) {
        // SAFETY: the list has so many devices, valid until it is freed.
        let (device, name, is_mlx5) = unsafe {
            let device = *list.add(idx);
            let name = (verbs.ibv_get_device_name)(device);
            let name = if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            };
            (device, name, (mlx5.mlx5dv_is_supported)(device))
        };
        let is_wanted = config.device.as_ref().is_none_or(|wanted| *wanted == name);
        if opened.is_some() || !is_mlx5 || !is_wanted {
            found.push(format!("{name}{}", if is_mlx5 { "" } else { " (not mlx5)" }));
            continue;
        }
        let mut attributes = ContextAttributes { flags: ffi::CONTEXT_FLAGS_DEVX, comp_mask: 0 };
        // SAFETY: a device of the list.
        let context = unsafe { (mlx5.mlx5dv_open_device)(device, &raw mut attributes) };
        opened = Some(if let Some(context) = NonNull::new(context) {
            Ok((name, context, Ok(())))
        } else {
            let reason = io::Error::last_os_error().to_string();
            // SAFETY: a device of the list.
            let context = unsafe { (verbs.ibv_open_device)(device) };
            match NonNull::new(context) {
                Some(context) => Ok((name, context, Err(reason))),
                None => Err(NicError::Call {
                    device: name,
                    call: "ibv_open_device",
                    source: io::Error::last_os_error(),
                    advice: "may this user open /dev/infiniband/uverbs*?",
                }),
            }
        });
    }
    // SAFETY: the list of above, freed once.
    unsafe { (verbs.ibv_free_device_list)(list) };
    opened.unwrap_or_else(|| Err(NicError::Absent { wanted: config.device.clone(), found }))
}

fn query_port(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
    config: &NicConfig,
) -> Result<Port, NicError> {
    let wrong = |found: String, expected| NicError::Port {
        device: name.to_owned(),
        port: config.port,
        found,
        expected,
    };
    let mut attributes = PortAttributes::default();
    // SAFETY: the context is open; the attributes are larger than any version's.
    let code = unsafe {
        (libraries.verbs.ibv_query_port)(context.as_ptr(), config.port, &raw mut attributes)
    };
    if code != 0 {
        return Err(code_error(name, "ibv_query_port", code, "does the device have this port?"));
    }
    if attributes.state != ffi::PORT_ACTIVE {
        let found = format!("state {}", attributes.state);
        return Err(wrong(found, "4 (active): check cable, switch and subnet manager"));
    }
    let link = if attributes.link_layer == ffi::LINK_LAYER_ETHERNET {
        LinkLayer::Ethernet
    } else {
        LinkLayer::InfiniBand
    };
    let gid_of = |gid_idx: u8| {
        let mut gid = [0; 16];
        // SAFETY: room for an address.
        let code = unsafe {
            (libraries.verbs.ibv_query_gid)(
                context.as_ptr(),
                config.port,
                c_int::from(gid_idx),
                &raw mut gid,
            )
        };
        (code == 0 && gid != [0; 16]).then_some(gid)
    };
    let gid_idx = match (config.gid_idx, link) {
        (Some(gid_idx), _) => gid_idx,
        (None, LinkLayer::InfiniBand) => 0,
        (None, LinkLayer::Ethernet) => {
            let types = config
                .root
                .join("sys/class/infiniband")
                .join(name)
                .join(format!("ports/{}/gid_attrs/types", config.port));
            let num_gids = u8::try_from(attributes.gid_tbl_len).unwrap_or(u8::MAX);
            choose_gid(&types, num_gids, gid_of).ok_or_else(|| {
                let found = format!("no RoCE v2 address among {num_gids}");
                wrong(found, "one: give the NIC's interface an IP address")
            })?
        }
    };
    let Some(gid) = gid_of(gid_idx) else {
        return Err(wrong(format!("no address of index {gid_idx}"), "one that `show_gids` lists"));
    };
    Ok(Port {
        number: config.port,
        link,
        lid: attributes.lid,
        gid,
        gid_idx,
        mtu: u8::try_from(attributes.active_mtu).unwrap_or(0),
        traffic_class: config.traffic_class,
        service_level: config.service_level,
    })
}

/// The first RoCE v2 address over IPv4, else the first at all.
fn choose_gid(types: &Path, num_gids: u8, gid_of: impl Fn(u8) -> Option<[u8; 16]>) -> Option<u8> {
    let is_v2 = |idx: &u8| {
        std::fs::read_to_string(types.join(idx.to_string()))
            .is_ok_and(|text| text.trim() == "RoCE v2")
    };
    let is_ipv4 = |gid: [u8; 16]| gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    let v2: Vec<u8> = (0..num_gids).filter(is_v2).filter(|idx| gid_of(*idx).is_some()).collect();
    v2.iter().copied().find(|idx| gid_of(*idx).is_some_and(is_ipv4)).or(v2.first().copied())
}

pub(crate) const fn no_object() -> DvObject {
    const fn none() -> InOut {
        InOut { input: ptr::null_mut(), output: ptr::null_mut() }
    }
    DvObject {
        qp: none(),
        cq: none(),
        srq: none(),
        rwq: none(),
        dm: none(),
        ah: none(),
        pd: none(),
    }
}

fn code_error(device: &str, call: &'static str, code: c_int, advice: &'static str) -> NicError {
    // Some versions return the code, some -1 and leave it in errno.
    let source =
        if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() };
    NicError::Call { device: device.to_owned(), call, source, advice }
}

/// Hops that packets may take.
pub(crate) const HOP_LIMIT: u8 = 64;
/// What to look at when DevX refuses.
pub(crate) const DEVX_ADVICE: &str = "CAP_NET_RAW and firmware with UCTX_EN=1 are needed";
/// Rights of memory that kernels and peers use.
const ALL_RIGHTS: c_int = ffi::ACCESS_LOCAL_WRITE
    | ffi::ACCESS_REMOTE_WRITE
    | ffi::ACCESS_REMOTE_READ
    | ffi::ACCESS_REMOTE_ATOMIC;
