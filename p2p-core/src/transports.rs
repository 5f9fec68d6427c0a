//! The transports that a process offers, from the user's request and the host's devices.
//!
//! ```
//! use switchyard_p2p_core::transports::{OpenNetworks, TransportSpec};
//!
//! let spec: TransportSpec = "shm,libfabric:tcp;ofi_rxm".parse().unwrap();
//! assert_eq!(spec.to_string(), "shm,libfabric:tcp;ofi_rxm");
//! let shm_only = OpenNetworks::default().open(&"shm".parse().unwrap()).unwrap();
//! assert!(shm_only.networks.is_empty());
//! ```

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
    /// All transports that work here, the fastest first: within a process, shared memory, verbs,
    /// libfabric.
    #[default]
    Auto,
    /// Exactly these transports.
    List(Vec<TransportRequest>),
}

/// One transport that the user asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TransportRequest {
    /// Kind.
    pub kind: TransportKind,
    /// Ports of verbs, joined by `+` or as `near=PCI` or `node=N`; provider of libfabric; port of
    /// ibgda. `None` leaves the choice to the transport.
    pub device: Option<String>,
}

impl fmt::Display for TransportRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        self.device.as_ref().map_or(Ok(()), |device| write!(f, ":{device}"))
    }
}

impl fmt::Display for TransportSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::List(requests) => {
                for (idx, request) in requests.iter().enumerate() {
                    let comma = if idx == 0 { "" } else { "," };
                    write!(f, "{comma}{request}")?;
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
    CHOICES.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
)]
pub struct ParseSpecError {
    /// The part that is no transport.
    pub found: String,
}

impl FromStr for TransportSpec {
    type Err = ParseSpecError;

    fn from_str(text: &str) -> Result<Self, ParseSpecError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let request = |part: &str| {
            let (name, device) = match part.split_once(':') {
                Some((name, device)) if !device.is_empty() => (name, Some(device.to_owned())),
                Some(_) => ("", None),
                None => (part, None),
            };
            let kind = CHOICES.iter().copied().find(|kind| kind.name() == name);
            let kind = kind.filter(|kind| device.is_none() || kind.is_network());
            let kind = kind.ok_or_else(|| ParseSpecError { found: part.to_owned() })?;
            Ok(TransportRequest { kind, device })
        };
        Ok(Self::List(text.split(',').map(request).collect::<Result<_, _>>()?))
    }
}

/// The transports that a process offers to its peers.
#[derive(Debug, Clone, Default)]
pub struct Transports {
    /// Kinds, the best first.
    pub kinds: Vec<TransportKind>,
    /// Networks behind the network kinds.
    pub networks: Vec<Arc<dyn Network>>,
    /// Transports that `auto` did not find here, one line each.
    pub missing: Vec<String>,
}

impl From<Vec<TransportKind>> for Transports {
    fn from(kinds: Vec<TransportKind>) -> Self {
        Self { kinds, ..Self::default() }
    }
}

/// A transport that the user named is not available.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This build does not include it.
    #[error("transport {request}: this build has no {}; build with `--features {}`, or use {here}", .request.kind.name(), .request.kind.name())]
    NotBuilt {
        /// The transport that was asked for.
        request: TransportRequest,
        /// The transports of this build.
        here: String,
    },
    /// This host does not have it, or it does not work.
    #[error("transport {request}: {source}; this host offers {here}")]
    NotHere {
        /// The transport that was asked for.
        request: TransportRequest,
        /// The transport's own reason.
        source: Box<NetworkError>,
        /// The transports that work here.
        here: String,
    },
}

/// Opens the networks of one transport kind. The crate of the transport makes it, and the program
/// registers it with [`OpenNetworks::with`].
#[derive(Clone)]
pub struct NetworkOpener {
    kind: TransportKind,
    open: Arc<OpenFn>,
    auto: Auto,
}

type OpenFn = dyn Fn(Option<&str>, &mut OpenNetworks) -> Result<Vec<Arc<dyn Network>>, NetworkError>
    + Send
    + Sync;

/// Treatment of a transport by `auto`.
#[derive(Clone)]
enum Auto {
    /// `auto` leaves the transport out.
    Never,
    /// `auto` opens the transport.
    Open,
    /// `auto` takes a network that opens its device when the first peer needs it.
    Lazy(Arc<dyn Fn() -> Arc<dyn Network> + Send + Sync>),
}

impl NetworkOpener {
    /// Makes an opener. `open` opens the networks behind a request, from its
    /// [`TransportRequest::device`]. It takes networks that it needs below them from the networks
    /// that the process has open. `auto` leaves this kind out.
    #[must_use]
    pub fn new(
        kind: TransportKind,
        open: impl Fn(Option<&str>, &mut OpenNetworks) -> Result<Vec<Arc<dyn Network>>, NetworkError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { kind, open: Arc::new(open), auto: Auto::Never }
    }

    /// Lets `auto` open it.
    #[must_use]
    pub fn in_auto(self) -> Self {
        Self { auto: Auto::Open, ..self }
    }

    /// Lets `auto` use `make`, whose network opens its device when the first peer needs it. For
    /// transports whose search for devices can take seconds.
    #[must_use]
    pub fn lazy_in_auto(self, make: impl Fn() -> Arc<dyn Network> + Send + Sync + 'static) -> Self {
        Self { auto: Auto::Lazy(Arc::new(make)), ..self }
    }

    /// The kind of its networks.
    #[must_use]
    pub const fn kind(&self) -> TransportKind {
        self.kind
    }

    const fn is_in_auto(&self) -> bool {
        !matches!(self.auto, Auto::Never)
    }
}

impl fmt::Debug for NetworkOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkOpener").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// The networks that a process has open. Each is opened once for all callers.
#[derive(Debug, Default)]
pub struct OpenNetworks {
    openers: Vec<NetworkOpener>,
    open: Vec<(TransportRequest, Vec<Arc<dyn Network>>)>,
}

impl OpenNetworks {
    /// Adds a transport, if this build has it. `auto` prefers transports that were added earlier.
    /// An opener of a known kind replaces the earlier one.
    #[must_use]
    pub fn with(mut self, opener: impl Into<Option<NetworkOpener>>) -> Self {
        let Some(opener) = opener.into() else { return self };
        match self.openers.iter_mut().find(|known| known.kind == opener.kind) {
            Some(known) => *known = opener,
            None => self.openers.push(opener),
        }
        self
    }

    /// Tells whether networks of `kind` can be opened in this build.
    #[must_use]
    pub fn knows(&self, kind: TransportKind) -> bool {
        self.openers.iter().any(|opener| opener.kind == kind)
    }

    /// Opens the transports of `spec`. `auto` leaves out transports that do not work here, and
    /// lists them in [`Transports::missing`]. May block for seconds while libraries look for
    /// devices.
    ///
    /// # Errors
    /// [`OpenError`] if a transport that `spec` names does not work here.
    pub fn open(&mut self, spec: &TransportSpec) -> Result<Transports, OpenError> {
        let mut transports = Transports::default();
        let is_auto = *spec == TransportSpec::Auto;
        let requests = match spec {
            TransportSpec::Auto => self.auto(),
            TransportSpec::List(requests) => requests.clone(),
        };
        for request in requests {
            if request.kind.is_network() {
                match self.open_one(&request, is_auto) {
                    Ok(networks) => transports.networks.extend(networks),
                    Err(error) if is_auto => {
                        transports.missing.push(error.to_string());
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            if !transports.kinds.contains(&request.kind) {
                transports.kinds.push(request.kind);
            }
        }
        Ok(transports)
    }

    /// The transports that `auto` tries, the fastest first.
    fn auto(&self) -> Vec<TransportRequest> {
        let networks = self.openers.iter().filter(|opener| opener.is_in_auto());
        let kinds = MEMORY.into_iter().chain(networks.map(NetworkOpener::kind));
        kinds.map(|kind| TransportRequest { kind, device: None }).collect()
    }

    fn open_one(
        &mut self,
        request: &TransportRequest,
        is_auto: bool,
    ) -> Result<Vec<Arc<dyn Network>>, OpenError> {
        if let Some((_, networks)) = self.open.iter().find(|(known, _)| known == request) {
            return Ok(networks.clone());
        }
        let opener = self.openers.iter().find(|opener| opener.kind == request.kind).cloned();
        let opener = opener.ok_or_else(|| OpenError::NotBuilt {
            request: request.clone(),
            here: self.built_in(),
        })?;
        let opened = match &opener.auto {
            Auto::Lazy(make) if is_auto => Ok(vec![make()]),
            _ => (opener.open)(request.device.as_deref(), self),
        };
        let networks = opened.map_err(|source| OpenError::NotHere {
            request: request.clone(),
            source: Box::new(source),
            here: self.offered_here(request, is_auto).join(", "),
        })?;
        self.open.push((request.clone(), networks.clone()));
        Ok(networks)
    }

    /// Lists the transports that this host offers instead of `missing`: the open ones and, for a
    /// user's request, others that can be opened. `auto` tries these anyway, and must not search
    /// for devices early.
    fn offered_here(&self, missing: &TransportRequest, is_auto: bool) -> Vec<String> {
        let mut here = MEMORY.map(|kind| kind.name().to_owned()).to_vec();
        here.extend(self.open.iter().map(|(request, _)| request.to_string()));
        if is_auto {
            return here;
        }
        for opener in self.openers.iter().filter(|opener| opener.is_in_auto()) {
            let request = TransportRequest { kind: opener.kind, device: None };
            let is_new =
                request != *missing && self.open.iter().all(|(known, _)| *known != request);
            let mut trial = Self { openers: self.openers.clone(), open: Vec::new() };
            if is_new && (opener.open)(None, &mut trial).is_ok() {
                here.push(request.to_string());
            }
        }
        here
    }

    /// Names of the transports of this build.
    fn built_in(&self) -> String {
        let networks = self.openers.iter().map(NetworkOpener::kind);
        let names: Vec<_> = MEMORY.into_iter().chain(networks).map(TransportKind::name).collect();
        names.join(", ")
    }
}

/// Transports that need no network, the fastest first.
const MEMORY: [TransportKind; 2] = [TransportKind::Local, TransportKind::Shm];

/// Transports that a user may name.
const CHOICES: &[TransportKind] = &[
    TransportKind::Local,
    TransportKind::Shm,
    #[cfg(feature = "test-transports")]
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
            "verbs:mlx5_0,libfabric:tcp;ofi_rxm,shm",
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
            let staged = if cfg!(feature = "test-transports") { "staged, " } else { "" };
            let expected = format!("local, shm, {staged}verbs, libfabric, ibgda");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }

    /// A network that no test opens a side of.
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
    fn networks_are_opened_once_for_each_wish() {
        let (opened, prefix) = (Arc::new(AtomicUsize::new(0)), "of");
        let counted = Arc::clone(&opened);
        let open = move |device: Option<&str>, networks: &mut OpenNetworks| {
            counted.fetch_add(1, Ordering::Relaxed);
            // Networks below it come from the same set.
            let below = networks.open(&"shm".parse().unwrap()).unwrap();
            assert_eq!(below.kinds, [TransportKind::Shm]);
            match device {
                Some("nonesuch") => Err(missing("open")),
                device => Ok(vec![Arc::new(Stub(format!("{prefix}-{}", device.unwrap_or("any"))))
                    as Arc<dyn Network>]),
            }
        };
        let spec = "shm,ibgda:mlx5_0:1,ibgda".parse().unwrap();
        let Err(error) = OpenNetworks::default().open(&spec) else {
            panic!("nothing is registered")
        };
        let text = error.to_string();
        assert!(
            text.contains("this build has no ibgda") && text.ends_with("use local, shm"),
            "{text}"
        );
        let opener = NetworkOpener::new(TransportKind::Ibgda, open);
        let mut networks = OpenNetworks::default().with(opener);
        assert!(networks.knows(TransportKind::Ibgda) && !networks.knows(TransportKind::Verbs));
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
        // `auto` never asks for it.
        networks.open(&TransportSpec::Auto).unwrap();
        assert_eq!(opened.load(Ordering::Relaxed), 3);
    }

    /// An opener of `kind` that works or not, and counts its calls.
    fn opener(kind: TransportKind, works: bool) -> (NetworkOpener, Arc<AtomicUsize>) {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let opener = NetworkOpener::new(kind, move |device, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            if !works || device == Some("nonesuch") {
                return Err(missing("open"));
            }
            Ok(vec![Arc::new(Stub("s".to_owned())) as Arc<dyn Network>])
        });
        (opener, calls)
    }

    #[test]
    fn auto_opens_registered_transports_in_their_order_and_lists_the_missing_ones() {
        let (verbs, _) = opener(TransportKind::Verbs, false);
        let (libfabric, calls) = opener(TransportKind::Libfabric, true);
        let lazy = libfabric.lazy_in_auto(|| Arc::new(Stub("lazy".to_owned())) as Arc<dyn Network>);
        let mut networks = OpenNetworks::default().with(verbs.in_auto()).with(lazy);
        for _ in 0..2 {
            let found = networks.open(&TransportSpec::Auto).unwrap();
            let kinds = [TransportKind::Local, TransportKind::Shm, TransportKind::Libfabric];
            assert_eq!(found.kinds, kinds);
            assert_eq!(found.networks[0].flavour(), "lazy");
            assert_eq!(found.missing.len(), 1);
            assert!(found.missing[0].contains("transport verbs: stub: open failed"), "{found:?}");
        }
        assert_eq!(calls.load(Ordering::Relaxed), 0, "only a peer opens it");
    }

    #[test]
    fn offers_of_a_host_do_not_depend_on_the_transport_that_was_asked_for_first() {
        for (is_verbs_here, is_libfabric_here) in [(true, false), (false, true), (true, true)] {
            let (verbs, _) = opener(TransportKind::Verbs, is_verbs_here);
            let (libfabric, _) = opener(TransportKind::Libfabric, is_libfabric_here);
            let networks = || {
                OpenNetworks::default()
                    .with(verbs.clone().in_auto())
                    .with(libfabric.clone().in_auto())
            };
            for kind in [TransportKind::Libfabric, TransportKind::Verbs] {
                let spec = format!("{}:nonesuch", kind.name()).parse().unwrap();
                let Err(OpenError::NotHere { here, .. }) = networks().open(&spec) else {
                    panic!("there is no such device");
                };
                let mut expected = vec!["local", "shm"];
                expected.extend(is_verbs_here.then_some("verbs"));
                expected.extend(is_libfabric_here.then_some("libfabric"));
                assert_eq!(here, expected.join(", "));
            }
        }
    }

    #[test]
    fn auto_always_has_memory_and_first() {
        let found = OpenNetworks::default().open(&TransportSpec::Auto).unwrap();
        assert_eq!(found.kinds[..2], [TransportKind::Local, TransportKind::Shm]);
        for network in &found.networks {
            assert!(found.kinds.contains(&network.kind()));
        }
    }
}
