//! Which transports a process offers: what the user asked for, and what the host has.
//!
//! ```
//! use p2p_core::transports::{OpenNetworks, TransportSpec};
//!
//! let spec: TransportSpec = "shm,libfabric:tcp;ofi_rxm".parse().unwrap();
//! assert_eq!(spec.to_string(), "shm,libfabric:tcp;ofi_rxm");
//! let shm_only = OpenNetworks::default().open(&"shm".parse().unwrap()).unwrap();
//! assert!(shm_only.networks.is_empty());
//! ```

#[cfg(any(feature = "libfabric", test))]
mod postponed;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::endpoint::TransportKind;
use crate::network::{Network, NetworkError};

/// Transports in order of preference: `auto`, or a list as in
/// `shm,verbs:mlx5_0:1+mlx5_1:1,libfabric:tcp;ofi_rxm`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum TransportSpec {
    /// Whatever works here, the fastest first: within a process, shared memory, verbs, libfabric.
    #[default]
    Auto,
    /// Exactly these.
    List(Vec<Wish>),
}

/// One transport that somebody asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wish {
    /// Kind.
    pub kind: TransportKind,
    /// Ports of verbs, joined by `+` or as `near=PCI`, `node=N`; provider of libfabric; port of ibgda;
    /// `None` leaves the choice.
    pub device: Option<String>,
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        self.device.as_ref().map_or(Ok(()), |device| write!(f, ":{device}"))
    }
}

impl fmt::Display for TransportSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::List(wishes) => {
                for (idx, wish) in wishes.iter().enumerate() {
                    let comma = if idx == 0 { "" } else { "," };
                    write!(f, "{comma}{wish}")?;
                }
                Ok(())
            }
        }
    }
}

/// A text that names no transports.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`{found}` is not a transport: expected auto, or a list of {}, each with :DEVICE or :PROVIDER where it has one",
    CHOICES.map(TransportKind::name).join(", ")
)]
pub struct ParseSpecError {
    /// What was found.
    pub found: String,
}

impl FromStr for TransportSpec {
    type Err = ParseSpecError;

    fn from_str(text: &str) -> Result<Self, ParseSpecError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let wish = |part: &str| {
            let (name, device) = match part.split_once(':') {
                Some((name, device)) if !device.is_empty() => (name, Some(device.to_owned())),
                Some(_) => ("", None),
                None => (part, None),
            };
            let kind = CHOICES.into_iter().find(|kind| kind.name() == name);
            let kind = kind.filter(|kind| device.is_none() || kind.is_network());
            let kind = kind.ok_or_else(|| ParseSpecError { found: part.to_owned() })?;
            Ok(Wish { kind, device })
        };
        Ok(Self::List(text.split(',').map(wish).collect::<Result<_, _>>()?))
    }
}

/// What a process offers to its peers.
#[derive(Debug, Clone, Default)]
pub struct Transports {
    /// Kinds, the best first.
    pub kinds: Vec<TransportKind>,
    /// Networks behind those kinds that are networks.
    pub networks: Vec<Arc<dyn Network>>,
    /// What `auto` found missing here, a line each.
    pub missing: Vec<String>,
}

impl From<Vec<TransportKind>> for Transports {
    fn from(kinds: Vec<TransportKind>) -> Self {
        Self { kinds, ..Self::default() }
    }
}

/// A transport that was asked for by name cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This build does not have it.
    #[error("transport {wish}: this build has no {}; build with `--features {}`, or use {}", .wish.kind.name(), .wish.kind.name(), built_in())]
    NotBuilt {
        /// What was asked for.
        wish: Wish,
    },
    /// This host does not have it, or not in working order.
    #[error("transport {wish}: {source}; this host offers {here}")]
    NotHere {
        /// What was asked for.
        wish: Wish,
        /// Why not.
        source: Box<NetworkError>,
        /// What works.
        here: String,
    },
}

/// How to open networks of another crate.
#[derive(Clone)]
pub struct OpenOther(Arc<OpenWish>);

type OpenWish = dyn Fn(Option<&str>, &mut OpenNetworks) -> Result<Vec<Arc<dyn Network>>, NetworkError>
    + Send
    + Sync;

impl OpenOther {
    /// `open` opens the networks behind a wish, whose [`Wish::device`] it is given. What they need beside
    /// them comes from what the process has open.
    #[must_use]
    pub fn new(
        open: impl Fn(Option<&str>, &mut OpenNetworks) -> Result<Vec<Arc<dyn Network>>, NetworkError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self(Arc::new(open))
    }
}

impl fmt::Debug for OpenOther {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenOther").finish_non_exhaustive()
    }
}

/// The networks that a process has open, so that each is opened once whoever asks for it.
#[derive(Debug, Default)]
pub struct OpenNetworks {
    /// How to open networks of other crates, by their kind.
    pub others: Vec<(TransportKind, OpenOther)>,
    /// How to use RDMA devices. Ports named by a wish take the place of those named here.
    #[cfg(feature = "verbs")]
    pub verbs: crate::backend::verbs::VerbsConfig,
    open: Vec<(Wish, Vec<Arc<dyn Network>>)>,
}

impl OpenNetworks {
    /// Opens what `spec` asks for. `auto` leaves out what is not here, and says so in
    /// [`Transports::missing`]; libfabric it opens when the first peer needs it, because its search for
    /// providers can take seconds.
    ///
    /// # Errors
    /// [`OpenError`], when something asked for by name is not here.
    pub fn open(&mut self, spec: &TransportSpec) -> Result<Transports, OpenError> {
        let mut transports = Transports::default();
        let wishes = match spec {
            TransportSpec::Auto => AUTO.map(|kind| Wish { kind, device: None }).to_vec(),
            TransportSpec::List(wishes) => wishes.clone(),
        };
        for wish in wishes {
            if wish.kind.is_network() {
                let opened = match wish.kind {
                    TransportKind::Libfabric if *spec == TransportSpec::Auto => {
                        self.postpone(&wish)
                    }
                    _ => self.open_one(&wish),
                };
                match opened {
                    Ok(networks) => transports.networks.extend(networks),
                    Err(error) if *spec == TransportSpec::Auto => {
                        transports.missing.push(error.to_string());
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            if !transports.kinds.contains(&wish.kind) {
                transports.kinds.push(wish.kind);
            }
        }
        Ok(transports)
    }

    /// libfabric's default provider, to be opened when it is needed.
    fn postpone(&mut self, wish: &Wish) -> Result<Vec<Arc<dyn Network>>, OpenError> {
        if let Some((_, networks)) = self.open.iter().find(|(known, _)| known == wish) {
            return Ok(networks.clone());
        }
        #[cfg(feature = "libfabric")]
        {
            let networks = vec![shared(postponed::Libfabric::default())];
            self.open.push((wish.clone(), networks.clone()));
            Ok(networks)
        }
        #[cfg(not(feature = "libfabric"))]
        Err(OpenError::NotBuilt { wish: wish.clone() })
    }

    fn open_one(&mut self, wish: &Wish) -> Result<Vec<Arc<dyn Network>>, OpenError> {
        if let Some((_, networks)) = self.open.iter().find(|(known, _)| known == wish) {
            return Ok(networks.clone());
        }
        let other = self.others.iter().find(|(kind, _)| *kind == wish.kind).cloned();
        let opened = match other {
            Some((_, OpenOther(open))) => Some(open(wish.device.as_deref(), self)),
            None => self.open_network(wish),
        };
        let opened = opened.ok_or_else(|| OpenError::NotBuilt { wish: wish.clone() })?;
        let networks = opened.map_err(|source| OpenError::NotHere {
            wish: wish.clone(),
            source: Box::new(source),
            here: self.offered_here(wish).join(", "),
        })?;
        self.open.push((wish.clone(), networks.clone()));
        Ok(networks)
    }

    /// The settings of verbs, with the ports of a wish where it names some.
    #[cfg(feature = "verbs")]
    fn verbs_config(&self, ports: Option<&str>) -> crate::backend::verbs::VerbsConfig {
        let config = self.verbs.clone();
        match ports {
            Some(ports) => config.on_ports(ports),
            None => config,
        }
    }

    /// What this host offers instead of `missing`: what is open, and what else can be opened.
    fn offered_here(&self, missing: &Wish) -> Vec<String> {
        let mut here = vec!["local".to_owned(), "shm".to_owned()];
        let networks = AUTO.into_iter().filter(|kind| kind.is_network());
        let others = networks.map(|kind| Wish { kind, device: None }).filter(|w| w != missing);
        let is_new = |wish: &Wish| self.open.iter().all(|(known, _)| known != wish);
        let works = |wish: &Wish| matches!(self.open_network(wish), Some(Ok(_)));
        here.extend(self.open.iter().map(|(wish, _)| wish.to_string()));
        here.extend(others.filter(|wish| is_new(wish) && works(wish)).map(|wish| wish.to_string()));
        here
    }

    /// Networks of this host behind a wish; `None` when this build knows no such network.
    #[allow(clippy::match_single_binding, clippy::unused_self, reason = "depends on the features")]
    fn open_network(&self, wish: &Wish) -> Option<Result<Vec<Arc<dyn Network>>, NetworkError>> {
        match wish.kind {
            #[cfg(feature = "libfabric")]
            TransportKind::Libfabric => {
                use crate::backend::libfabric::{DEFAULT_PROVIDER, FabricNetwork};
                let provider = wish.device.as_deref().unwrap_or(DEFAULT_PROVIDER);
                Some(FabricNetwork::open(provider).map(|network| vec![shared(network)]))
            }
            #[cfg(feature = "verbs")]
            TransportKind::Verbs => {
                use crate::backend::verbs::VerbsNetwork;
                let config = self.verbs_config(wish.device.as_deref());
                Some(VerbsNetwork::open(config).map(|network| vec![shared(network)]))
            }
            _ => None,
        }
    }
}

#[cfg(any(feature = "libfabric", feature = "verbs"))]
fn shared(network: impl Network + 'static) -> Arc<dyn Network> {
    Arc::new(network)
}

/// Names of the transports of this build.
fn built_in() -> String {
    let mut names = vec![TransportKind::Local.name(), TransportKind::Shm.name()];
    if cfg!(feature = "libfabric") {
        names.push(TransportKind::Libfabric.name());
    }
    if cfg!(feature = "verbs") {
        names.push(TransportKind::Verbs.name());
    }
    names.join(", ")
}

/// What is tried without a wish, the fastest first.
const AUTO: [TransportKind; 4] =
    [TransportKind::Local, TransportKind::Shm, TransportKind::Verbs, TransportKind::Libfabric];

/// What a user may ask for.
const CHOICES: [TransportKind; 6] = [
    TransportKind::Local,
    TransportKind::Shm,
    TransportKind::Staged,
    TransportKind::Verbs,
    TransportKind::Libfabric,
    TransportKind::Ibgda,
];

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::network::{OpenSide, Route};
    use crate::slot::SlotLayout;

    #[test]
    fn lists_are_read_or_refused() {
        for text in [
            "auto",
            "shm",
            "shm,verbs",
            "verbs:mlx5_0,libfabric:tcp;ofi_rxm,staged",
            "ibgda",
            "shm,ibgda:mlx5_0:1,verbs",
        ] {
            let spec: TransportSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        for (text, found) in [
            ("", ""),
            ("shm,", ""),
            ("tcp", "tcp"),
            ("shm:0", "shm:0"),
            ("verbs:", "verbs:"),
            ("auto,shm", "auto"),
            ("cuda_ipc", "cuda_ipc"),
            ("ibgda:", "ibgda:"),
            ("shm,IBGDA", "IBGDA"),
        ] {
            let error = text.parse::<TransportSpec>().unwrap_err();
            assert_eq!(error.found, found);
            let expected = "local, shm, staged, verbs, libfabric, ibgda";
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    /// Nobody opens a side of it.
    #[derive(Debug)]
    struct Stub(String);

    impl Network for Stub {
        fn kind(&self) -> TransportKind {
            TransportKind::Ibgda
        }

        fn flavour(&self) -> &str {
            &self.0
        }

        fn open(&self, _: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
            Err(missing("open a side"))
        }
    }

    fn missing(op: &'static str) -> NetworkError {
        NetworkError { network: "stub".to_owned(), op, code: None, detail: "not here".to_owned() }
    }

    #[test]
    fn networks_of_other_crates_are_opened_once_for_each_wish_by_what_was_given() {
        let (opened, prefix) = (Arc::new(AtomicUsize::new(0)), "of");
        let counted = Arc::clone(&opened);
        let open = move |device: Option<&str>, networks: &mut OpenNetworks| {
            counted.fetch_add(1, Ordering::Relaxed);
            // What is underneath comes from the same place.
            let under = networks.open(&"shm".parse().unwrap()).unwrap();
            assert_eq!(under.kinds, [TransportKind::Shm]);
            match device {
                Some("nonesuch") => Err(missing("open")),
                device => Ok(vec![Arc::new(Stub(format!("{prefix}-{}", device.unwrap_or("any"))))
                    as Arc<dyn Network>]),
            }
        };
        let mut networks = OpenNetworks::default();
        // This build does not know it by itself.
        let spec = "shm,ibgda:mlx5_0:1,ibgda".parse().unwrap();
        assert!(matches!(networks.open(&spec), Err(OpenError::NotBuilt { .. })));
        networks.others.push((TransportKind::Ibgda, OpenOther::new(open)));
        for _ in 0..2 {
            let found = networks.open(&spec).unwrap();
            assert_eq!(found.kinds, [TransportKind::Shm, TransportKind::Ibgda]);
            let flavours: Vec<_> = found.networks.iter().map(|network| network.flavour()).collect();
            assert_eq!(flavours, ["of-mlx5_0:1", "of-any"]);
        }
        assert_eq!(opened.load(Ordering::Relaxed), 2);
        let refused = networks.open(&"ibgda:nonesuch".parse().unwrap()).unwrap_err().to_string();
        for part in ["transport ibgda:nonesuch: stub: open failed: not here", "ibgda:mlx5_0:1"] {
            assert!(refused.contains(part), "{refused}");
        }
        // `auto` never asks.
        networks.open(&TransportSpec::Auto).unwrap();
        assert_eq!(opened.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn auto_always_has_memory_and_first() {
        let found = OpenNetworks::default().open(&TransportSpec::Auto).unwrap();
        assert_eq!(found.kinds[..2], [TransportKind::Local, TransportKind::Shm]);
        for network in &found.networks {
            assert!(found.kinds.contains(&network.kind()));
        }
    }

    #[test]
    #[cfg(feature = "verbs")]
    fn ports_near_something_mean_the_same_wherever_they_are_named() {
        use crate::backend::verbs::{PortChoice, VerbsConfig};
        let verbs =
            VerbsConfig { traffic_class: 106, gid_index: Some(3), ..VerbsConfig::default() };
        let networks = OpenNetworks { verbs: verbs.clone(), ..OpenNetworks::default() };
        for text in ["near=0000:3b:00.0", "node=1", "mlx5_0:1+mlx5_1"] {
            let TransportSpec::List(wishes) = format!("verbs:{text}").parse().unwrap() else {
                panic!("a list");
            };
            let found = networks.verbs_config(wishes[0].device.as_deref());
            assert_eq!(found, verbs.clone().on_ports(text));
            assert_eq!(found.ports, VerbsConfig::on(text).ports);
            assert_ne!(found.ports, PortChoice::First);
        }
        assert_eq!(networks.verbs_config(None), verbs);
    }

    #[test]
    #[cfg(any(feature = "verbs", feature = "libfabric"))]
    fn what_a_host_offers_instead_does_not_depend_on_what_was_asked_first() {
        // A network that is here, and a wish that is not.
        for kind in [TransportKind::Libfabric, TransportKind::Verbs] {
            let wish = Wish { kind, device: None };
            let is_here = OpenNetworks::default().open_one(&wish).is_ok();
            let missing = format!("{kind}:nonesuch,{kind}", kind = kind.name()).parse().unwrap();
            let Err(OpenError::NotHere { here, .. }) = OpenNetworks::default().open(&missing)
            else {
                println!("{} is not in this build", kind.name());
                continue;
            };
            println!("{kind:?}: {here}");
            assert!(here.starts_with("local, shm"), "{here}");
            assert_eq!(here.split(", ").any(|name| name == kind.name()), is_here, "{here}");
        }
    }
}
