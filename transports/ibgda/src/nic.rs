//! A port of an mlx5 NIC, opened for queues that a GPU posts on.

mod capability;
mod inspect;
mod memory;
mod open;

use std::ffi::{c_int, c_void};
use std::io;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use thiserror::Error;

use self::capability::{query_devx, query_limits};
use self::open::{Closer, OpenDevice, open_device, query_port};
use crate::access::{NoDescriptor, PageTable};
use crate::ffi::{self, AhAttributes, DvAh, DvObject, DvPd, GlobalRoute, InOut};
use crate::library::{Libraries, LibraryError};
use crate::missing::{MissingPart, list};
use crate::prm::{AtomicCapabilities, GeneralCapabilities, Refused};

pub(crate) use self::capability::MAX_READS;
pub use self::capability::{Capabilities, DeviceLimits};
pub use self::inspect::{Inspection, PortInspection, inspect};
pub(crate) use self::memory::UmemOwner;
pub use self::memory::{Registration, RegistrationMethod, Rights};
pub use self::open::{Address, PortState};

/// Selects the NIC, and how to use its port.
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
    /// Root of `sys/class`; `/` except in tests.
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
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum NicError {
    /// A library is missing.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call of libibverbs or libmlx5 failed.
    #[error("{device}: {call} failed: {source}; {advice}")]
    Call {
        device: String,
        call: &'static str,
        /// The system's answer.
        source: io::Error,
        advice: &'static str,
    },
    /// The firmware refused a command.
    #[error("{device}: {source}")]
    Refused {
        device: String,
        /// Missing feature and reason.
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
    Port { device: String, port: u8, found: String, expected: &'static str },
    /// The device lacks something.
    #[error("{device} cannot do this: {what} is {found}, expected {expected}")]
    Capability {
        device: String,
        /// Name of the capability.
        what: &'static str,
        found: String,
        expected: &'static str,
    },
    /// DevX commands are not allowed or not there.
    #[error(
        "{device}: DevX is not available ({detail}); queues in GPU memory need it: CAP_NET_RAW and firmware with UCTX_EN=1, or use the plain path"
    )]
    NoDevx { device: String, detail: String },
    /// Memory that the NIC cannot reach.
    #[error(
        "{device}: {bytes} bytes of GPU memory cannot be registered: by dma-buf: {dma_buf}; by address, which is nvidia_peermem's: {call} failed: {by_address}; {}",
        list(missing)
    )]
    GpuMemory {
        device: String,
        bytes: u64,
        /// Error of the first method.
        dma_buf: DmaBufError,
        /// Function of the second method.
        call: &'static str,
        /// Error of the second method.
        by_address: io::Error,
        /// Parts that the probe finds missing for both methods. One method is enough.
        missing: Vec<MissingPart>,
    },
}

/// The reason why a NIC did not register memory by a descriptor of its pages.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum DmaBufError {
    /// The memory has no descriptor.
    #[error(transparent)]
    Descriptor(NoDescriptor),
    /// The NIC's driver refused it.
    #[error("{call} failed: {source}")]
    Call {
        call: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// Kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v2.
    Ethernet,
}

/// A port. Objects made from it keep it open.
#[derive(Debug)]
pub struct Nic {
    libraries: Libraries,
    name: String,
    context: NonNull<c_void>,
    pd: NonNull<c_void>,
    pdn: u32,
    capabilities: Capabilities,
    port: Port,
    /// Memory and pages that posters share among the queues of all peers.
    pages: Arc<PageTable>,
    /// Root of the host's files.
    root: PathBuf,
}

/// Properties of a NIC that takes DevX commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevxCapabilities {
    /// General.
    pub general: GeneralCapabilities,
    /// Atomic.
    pub atomic: AtomicCapabilities,
    /// Whether queue pairs without a doorbell record for requests are supported.
    pub can_do_without_record: bool,
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
    /// `IBV_MTU_*` in use.
    pub mtu: u8,
    /// As configured.
    pub traffic_class: u8,
    /// As configured.
    pub service_level: u8,
}

// SAFETY: libibverbs and libmlx5 allow calls on one context from any thread.
unsafe impl Send for Nic {}
// SAFETY: the same; nothing of this value changes after it was made, but for the table of pages, which has a
// lock.
unsafe impl Sync for Nic {}

impl Nic {
    /// Opens a port.
    ///
    /// # Errors
    /// [`NicError`], naming the missing part.
    pub fn open(libraries: &Libraries, config: &NicConfig) -> Result<Arc<Self>, NicError> {
        let OpenDevice { name, context, devx } = open_device(libraries, config)?;
        let closer = Closer { libraries, context };
        let port = query_port(libraries, context, &name, config)?;
        let capabilities = query_capabilities(libraries, context, &name, devx)?;
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
            // SAFETY: made above, without another user.
            unsafe { (libraries.verbs.ibv_dealloc_pd)(pd.as_ptr()) };
            return Err(error);
        }
        std::mem::forget(closer);
        Ok(Arc::new(Self {
            libraries: libraries.clone(),
            name,
            context,
            pd,
            pdn: dv.pdn,
            capabilities,
            port,
            pages: Arc::default(),
            root: config.root.clone(),
        }))
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

    /// Capabilities that the device reports.
    #[must_use]
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// [`Capabilities::check_requests`]
    ///
    /// # Errors
    /// [`NicError::Capability`].
    pub fn check_requests(&self) -> Result<(), NicError> {
        self.capabilities.check_requests()
    }

    /// [`Capabilities::devx()`]
    ///
    /// # Errors
    /// [`NicError::NoDevx`], [`NicError::Capability`].
    pub fn devx(&self) -> Result<DevxCapabilities, NicError> {
        self.capabilities.devx()
    }

    /// Hardware address of the next hop towards `gid`, as the kernel resolves it.
    ///
    /// # Errors
    /// [`NicError::Call`] when there is no route.
    pub fn next_hop(&self, gid: &[u8; 16], lid: u16) -> Result<[u8; 6], NicError> {
        let mut attributes = self.path(gid, lid);
        let (verbs, mlx5) = (&self.libraries.verbs, &self.libraries.mlx5);
        // SAFETY: the domain is open, the attributes are complete.
        let ah = unsafe { (verbs.ibv_create_ah)(self.pd.as_ptr(), &raw mut attributes) };
        if ah.is_null() {
            let advice =
                "no route to the peer's address: check routes and ARP of the NIC's interface";
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
            let advice = "libmlx5 is of another version";
            // A missing address is no system error, so `errno` may have any value.
            let code = if code == 0 { libc::EPROTO } else { code };
            code_error(&self.name, "mlx5dv_init_obj of an address handle", code, advice)
        })
    }

    /// Attributes of the route to a peer, for verbs.
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

    pub(crate) const fn pages(&self) -> &Arc<PageTable> {
        &self.pages
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
}

impl Drop for Nic {
    fn drop(&mut self) {
        // SAFETY: everything that was made from them holds a reference to this value, so is gone.
        let codes = unsafe {
            [
                ("ibv_dealloc_pd", (self.libraries.verbs.ibv_dealloc_pd)(self.pd.as_ptr())),
                (
                    "ibv_close_device",
                    (self.libraries.verbs.ibv_close_device)(self.context.as_ptr()),
                ),
            ]
        };
        for (call, code) in codes.into_iter().filter(|(_, code)| *code != 0) {
            tracing::error!(nic = self.name, call, code, "a NIC cannot be closed");
        }
    }
}

/// Properties that the device reports; `devx` says whether the context was opened with DevX.
fn query_capabilities(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
    devx: Result<(), String>,
) -> Result<Capabilities, NicError> {
    let limits = query_limits(libraries, context, name)?;
    let devx =
        devx.and_then(|()| query_devx(libraries, context, name).map_err(|error| error.to_string()));
    Ok(Capabilities { device: name.to_owned(), limits, devx })
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
/// Remedies when DevX refuses.
pub(crate) const DEVX_ADVICE: &str = "CAP_NET_RAW and firmware with UCTX_EN=1 are needed";
