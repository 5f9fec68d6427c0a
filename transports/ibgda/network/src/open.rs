//! Opens the network by the name of a device, such as `ibgda:mlx5_0`, or reports the parts that this host lacks.

use std::sync::Arc;

use ibgda::probe::{Report, State, probe};
use ibgda::{Libraries, Nic, NicConfig};
use p2p_core::TransportKind;
use p2p_core::network::{Network, NetworkError};
use p2p_core::transports::{OpenNetworks, TransportRequest, TransportSpec};

use crate::network::{DeviceConfig, DeviceNetwork};

/// Opens a port, named as `mlx5_0` or `mlx5_0:1`, or the first port of the first mlx5 device. The hosts are
/// joined by verbs on the same port if `networks` can open them, else by libfabric. `settings` are those of the port;
/// its device and number come from the name.
///
/// # Errors
/// [`NetworkError`], with the parts that this host lacks, or the reason why its NIC makes no such queues.
pub fn open(
    port: Option<&str>,
    networks: &mut OpenNetworks,
    settings: &NicConfig,
    device: DeviceConfig,
) -> Result<Vec<Arc<dyn Network>>, NetworkError> {
    let network = port.map_or_else(|| "ibgda".to_owned(), |port| format!("ibgda {port}"));
    let failed = |op, detail| NetworkError { network: network.clone(), op, code: None, detail };
    let config = nic_config(port, settings).map_err(|detail| failed("read its name", detail))?;
    let lacking = |error: String| failed("open", format!("{error}; {}", missing(&probe())));
    let libraries = Libraries::open().map_err(|error| lacking(error.to_string()))?;
    let nic = Nic::open(&libraries, &config).map_err(|error| lacking(error.to_string()))?;
    device.queue.check(&nic).map_err(|error| failed("check queues", error.to_string()))?;
    let request = host_request(networks, &format!("{}:{}", nic.name(), config.port));
    let hosts = networks
        .open(&TransportSpec::List(vec![request]))
        .map_err(|error| failed("join hosts", error.to_string()))?;
    let above = |inner: Arc<dyn Network>| {
        let network = DeviceNetwork::new(inner, Arc::clone(&nic), device);
        Arc::new(network) as Arc<dyn Network>
    };
    Ok(hosts.networks.into_iter().map(above).collect())
}

/// The transport that joins the hosts.
fn host_request(networks: &OpenNetworks, port: &str) -> TransportRequest {
    if networks.knows(TransportKind::Verbs) {
        return TransportRequest { kind: TransportKind::Verbs, device: Some(port.to_owned()) };
    }
    TransportRequest { kind: TransportKind::Libfabric, device: None }
}

fn nic_config(port: Option<&str>, settings: &NicConfig) -> Result<NicConfig, String> {
    let mut config = settings.clone();
    let Some(port) = port else { return Ok(config) };
    let (device, number) = port.split_once(':').unwrap_or((port, "1"));
    let number = number.parse().ok().filter(|number| *number > 0);
    match number {
        Some(number) if !device.is_empty() && !port.contains(['+', '=']) => {
            config.device = Some(device.to_owned());
            config.port = number;
            Ok(config)
        }
        _ => Err(format!("`{port}` is not one port of one device, as mlx5_0 or mlx5_0:1")),
    }
}

/// Describes the missing parts of a host.
fn missing(report: &Report) -> String {
    let missing = report.checks.iter().filter(|check| check.state == State::Missing);
    let missing: Vec<String> = missing
        .map(|check| match &check.remedy {
            Some(remedy) => format!("{}: {} → {remedy}", check.name, check.found),
            None => format!("{}: {}", check.name, check.found),
        })
        .collect();
    if missing.is_empty() {
        return "`switchyard doctor` finds nothing else missing".to_owned();
    }
    format!("this host lacks {}", missing.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_named_as_those_of_verbs_are() {
        let settings = NicConfig::default();
        let found =
            |text| nic_config(text, &settings).map(|config| (config.device, config.port)).ok();
        let named = |name: &str, port| Some((Some(name.to_owned()), port));
        assert_eq!(found(None), Some((None, 1)));
        assert_eq!(found(Some("mlx5_0")), named("mlx5_0", 1));
        assert_eq!(found(Some("mlx5_bond_0:2")), named("mlx5_bond_0", 2));
        for text in
            ["mlx5_0:", "mlx5_0:0", ":1", "mlx5_0:1+mlx5_1:1", "near=0000:3b:00.0", "node=1"]
        {
            assert_eq!(found(Some(text)), None, "{text}");
        }
    }

    #[test]
    fn a_host_without_a_device_is_told_what_it_lacks() {
        let name = "no_such_nic";
        let mut networks = OpenNetworks::default();
        let error = open(Some(name), &mut networks, &NicConfig::default(), DeviceConfig::default());
        let error = error.expect_err("there is no such device");
        assert_eq!((error.network.as_str(), error.op), ("ibgda no_such_nic", "open"));
        for check in probe().checks.iter().filter(|check| check.state == State::Missing) {
            assert!(error.detail.contains(check.name), "{}: {}", check.name, error.detail);
        }
    }
}
