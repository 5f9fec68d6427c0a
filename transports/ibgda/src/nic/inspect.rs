//! A device's report about itself, whether it is suitable or not.

use super::open::{Address, Closer, OpenDevice, PortState};
use super::open::{find_address, open_device, query_port_state};
use super::{Capabilities, NicConfig, NicError, query_capabilities};
use crate::library::Libraries;

/// A device.
#[derive(Debug)]
pub struct Inspection {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Capabilities.
    pub capabilities: Capabilities,
    /// In the order of their numbers.
    pub ports: Vec<PortInspection>,
}

/// A port of a device.
#[derive(Debug)]
pub struct PortInspection {
    /// Number, from 1.
    pub number: u8,
    /// State and limits.
    pub state: Result<PortState, NicError>,
    /// The address that queues use by default; `None` where nothing is known of the port.
    pub address: Option<Result<Address, NicError>>,
}

/// Inspects the device and all its ports, and leaves nothing open. Uses the device, address and root of `config`.
///
/// # Errors
/// [`NicError`] when there is no such device, or it cannot be opened or asked.
pub fn inspect(libraries: &Libraries, config: &NicConfig) -> Result<Inspection, NicError> {
    let OpenDevice { name, context, devx } = open_device(libraries, config)?;
    let _closer = Closer { libraries, context };
    let capabilities = query_capabilities(libraries, context, &name, devx)?;
    let look = |number| {
        let state = query_port_state(libraries, context, &name, number);
        let address =
            state.as_ref().ok().map(|state| find_address(libraries, context, &name, config, state));
        PortInspection { number, state, address }
    };
    let ports = (1..=capabilities.limits.num_ports).map(look).collect();
    Ok(Inspection { name, capabilities, ports })
}
