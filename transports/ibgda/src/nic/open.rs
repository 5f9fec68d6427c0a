//! Finding a device and its port's address.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::path::Path;
use std::ptr::NonNull;

use super::{LinkLayer, NicConfig, NicError, Port, code_error};
use crate::ffi::{self, ContextAttributes, PortAttributes};
use crate::library::Libraries;

/// Closes a context unless it was forgotten.
pub(super) struct Closer<'a> {
    pub(super) libraries: &'a Libraries,
    pub(super) context: NonNull<c_void>,
}

impl Drop for Closer<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by the maker of this value, and not yet used elsewhere.
        unsafe { (self.libraries.verbs.ibv_close_device)(self.context.as_ptr()) };
    }
}

/// An open device.
pub(super) struct OpenDevice {
    pub(super) name: String,
    pub(super) context: NonNull<c_void>,
    /// Or why there is none.
    pub(super) devx: Result<(), String>,
}

/// Finds and opens the device, with DevX if it can be had.
pub(super) fn open_device(
    libraries: &Libraries,
    config: &NicConfig,
) -> Result<OpenDevice, NicError> {
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
        // SAFETY: the list has this number of devices and is valid until it is freed.
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
            Ok(OpenDevice { name, context, devx: Ok(()) })
        } else {
            let reason = io::Error::last_os_error().to_string();
            // SAFETY: a device of the list.
            let context = unsafe { (verbs.ibv_open_device)(device) };
            match NonNull::new(context) {
                Some(context) => Ok(OpenDevice { name, context, devx: Err(reason) }),
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

/// A port as it is, of use or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortState {
    /// Number, from 1.
    pub number: u8,
    /// `IBV_PORT_*`
    pub state: u32,
    /// Kind of link.
    pub link: LinkLayer,
    /// InfiniBand's local address.
    pub lid: u16,
    /// `IBV_MTU_*` in force.
    pub mtu: u8,
    /// Places for global addresses.
    pub num_gids: u8,
}

/// A port's global address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Its place in the port's table.
    pub gid_idx: u8,
    /// Global address.
    pub gid: [u8; 16],
}

pub(super) fn query_port_state(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
    number: u8,
) -> Result<PortState, NicError> {
    let mut attributes = PortAttributes::default();
    // SAFETY: the context is open; the attributes are larger than any version's.
    let code =
        unsafe { (libraries.verbs.ibv_query_port)(context.as_ptr(), number, &raw mut attributes) };
    if code != 0 {
        return Err(code_error(name, "ibv_query_port", code, "does the device have this port?"));
    }
    Ok(PortState {
        number,
        state: attributes.state,
        link: if attributes.link_layer == ffi::LINK_LAYER_ETHERNET {
            LinkLayer::Ethernet
        } else {
            LinkLayer::InfiniBand
        },
        lid: attributes.lid,
        mtu: u8::try_from(attributes.active_mtu).unwrap_or(0),
        num_gids: u8::try_from(attributes.gid_tbl_len).unwrap_or(u8::MAX),
    })
}

impl PortState {
    /// Whether packets go over it.
    ///
    /// # Errors
    /// [`NicError::Port`].
    pub fn check_active(&self, device: &str) -> Result<(), NicError> {
        if self.state == ffi::PORT_ACTIVE {
            return Ok(());
        }
        let found = format!("state {}", self.state);
        let expected = "4 (active): check cable, switch and subnet manager";
        Err(NicError::Port { device: device.to_owned(), port: self.number, found, expected })
    }
}

/// The address of a port that `config` asks for.
pub(super) fn find_address(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
    config: &NicConfig,
    port: &PortState,
) -> Result<Address, NicError> {
    let wrong = |found: String, expected| NicError::Port {
        device: name.to_owned(),
        port: port.number,
        found,
        expected,
    };
    let gid_of = |gid_idx: u8| {
        let mut gid = [0; 16];
        // SAFETY: room for an address.
        let code = unsafe {
            (libraries.verbs.ibv_query_gid)(
                context.as_ptr(),
                port.number,
                c_int::from(gid_idx),
                &raw mut gid,
            )
        };
        (code == 0 && gid != [0; 16]).then_some(gid)
    };
    let gid_idx = match (config.gid_idx, port.link) {
        (Some(gid_idx), _) => gid_idx,
        (None, LinkLayer::InfiniBand) => 0,
        (None, LinkLayer::Ethernet) => {
            let types = config
                .root
                .join("sys/class/infiniband")
                .join(name)
                .join(format!("ports/{}/gid_attrs/types", port.number));
            choose_gid(&types, port.num_gids, gid_of).ok_or_else(|| {
                let found = format!("no RoCE v2 address among {}", port.num_gids);
                wrong(found, "one: give the NIC's interface an IP address")
            })?
        }
    };
    let Some(gid) = gid_of(gid_idx) else {
        return Err(wrong(format!("no address of index {gid_idx}"), "one that `show_gids` lists"));
    };
    Ok(Address { gid_idx, gid })
}

pub(super) fn query_port(
    libraries: &Libraries,
    context: NonNull<c_void>,
    name: &str,
    config: &NicConfig,
) -> Result<Port, NicError> {
    let state = query_port_state(libraries, context, name, config.port)?;
    state.check_active(name)?;
    let Address { gid_idx, gid } = find_address(libraries, context, name, config, &state)?;
    Ok(Port {
        number: config.port,
        link: state.link,
        lid: state.lid,
        gid,
        gid_idx,
        mtu: state.mtu,
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
