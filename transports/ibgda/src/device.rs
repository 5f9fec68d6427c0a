//! Devices as libibverbs lists them.

use std::ffi::{CStr, c_int};
use std::io;

use thiserror::Error;

use crate::ffi::{CONTEXT_FLAGS_DEVX, ContextAttributes};
use crate::library::{Libraries, LibraryError};

/// A device of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Whether its driver is mlx5.
    pub is_mlx5: bool,
    /// Whether it can be opened with DevX; `Err` says why not. Queues in GPU memory need it.
    pub devx: Result<(), String>,
}

/// Devices could not be listed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library is missing.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The kernel has no RDMA subsystem, or denies access to it.
    #[error("ibv_get_device_list failed: {0}; is the module ib_uverbs loaded?")]
    List(io::Error),
}

/// All devices of the host, mlx5 or not.
///
/// # Errors
/// [`DeviceError`].
pub fn devices(libraries: &Libraries) -> Result<Vec<Device>, DeviceError> {
    let (verbs, mlx5) = (&libraries.verbs, &libraries.mlx5);
    let mut num_devices: c_int = 0;
    // SAFETY: a valid place for the number.
    let list = unsafe { (verbs.ibv_get_device_list)(&raw mut num_devices) };
    if list.is_null() {
        return Err(DeviceError::List(io::Error::last_os_error()));
    }
    let mut devices = Vec::new();
    for idx in 0..usize::try_from(num_devices).unwrap_or(0) {
        // SAFETY: the list has this number of devices, each valid until the list is freed; every opened context is
        // closed before.
        unsafe {
            let device = *list.add(idx);
            let text = (verbs.ibv_get_device_name)(device);
            let is_mlx5 = (mlx5.mlx5dv_is_supported)(device);
            let devx = if is_mlx5 {
                let mut attributes = ContextAttributes { flags: CONTEXT_FLAGS_DEVX, comp_mask: 0 };
                let context = (mlx5.mlx5dv_open_device)(device, &raw mut attributes);
                if context.is_null() {
                    Err(format!("mlx5dv_open_device: {}", io::Error::last_os_error()))
                } else {
                    (verbs.ibv_close_device)(context);
                    Ok(())
                }
            } else {
                Err("not an mlx5 device".to_owned())
            };
            let name = if text.is_null() {
                String::new()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            };
            devices.push(Device { name, is_mlx5, devx });
        }
    }
    // SAFETY: the list of above, freed once.
    unsafe { (verbs.ibv_free_device_list)(list) };
    Ok(devices)
}
