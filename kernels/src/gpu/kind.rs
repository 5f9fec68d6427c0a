//! The driver's GPU or one in software, behind the same calls.

/// The driver's, or software's.
#[derive(Debug, Clone)]
pub(super) enum Kind<D, E> {
    Driver(D),
    Emulated(E),
}

/// The same call on whichever it is.
macro_rules! either {
    ($kind:expr, $it:ident => $call:expr) => {
        match $kind {
            Kind::Driver($it) => $call,
            Kind::Emulated($it) => $call,
        }
    };
}

/// The same call on whichever it is, its result wrapped alike.
macro_rules! wrapped {
    ($kind:expr, $it:ident => $call:expr, $wrap:path) => {
        match $kind {
            Kind::Driver($it) => $call.map(Kind::Driver).map($wrap),
            Kind::Emulated($it) => $call.map(Kind::Emulated).map($wrap),
        }
    };
}
