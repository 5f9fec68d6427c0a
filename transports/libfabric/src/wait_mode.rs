//! The choice between sleeping on a descriptor and polling.

use std::sync::Once;

use super::port::core_of;

/// Variable that says how to wait for peers: `descriptor`, the default, or `poll`.
pub const WAIT_VARIABLE: &str = "SWITCHYARD_LIBFABRIC_WAIT";

/// How a waiting thread learns of arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitMode {
    /// By the queue's descriptor, if the provider has one. No thread polls in vain, but every
    /// packet costs a report to the epoll sets with the descriptor.
    Descriptor,
    /// By polling, at longer intervals the longer nothing has arrived.
    Poll,
}

impl WaitMode {
    /// Reads the mode from the environment.
    pub(super) fn from_environment(provider: &str) -> Result<Self, String> {
        let value = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (wish, rxm, tcp) = (value(WAIT_VARIABLE), value(RXM_VARIABLE), value(TCP_VARIABLE));
        let wait_mode = Self::choose(provider, wish.as_deref(), rxm.as_deref(), tcp.as_deref())?;
        if wait_mode == Self::Poll && wish.is_none() {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!(
                    provider,
                    "{RXM_VARIABLE} or {TCP_VARIABLE} is `pollfd`, which leaves nothing to sleep on: \
                     waiting as with {WAIT_VARIABLE}=poll, which is enough by itself"
                );
            });
        }
        Ok(wait_mode)
    }

    /// Arguments `rxm` and `tcp` are the values of the library's own variables.
    fn choose(
        provider: &str,
        wish: Option<&str>,
        rxm: Option<&str>,
        tcp: Option<&str>,
    ) -> Result<Self, String> {
        match wish {
            None | Some("descriptor") => {}
            Some("poll") => return Ok(Self::Poll),
            Some(other) => {
                return Err(format!(
                    "{WAIT_VARIABLE} is `{other}`, expected `descriptor` or `poll`"
                ));
            }
        }
        let core = core_of(provider);
        let own = if core == "tcp" { tcp.or(rxm) } else { rxm };
        let is_dead = core.len() < provider.len()
            && own.is_some_and(|value| value.eq_ignore_ascii_case("pollfd"));
        // The descriptor exists in this case but never fires: `ofi_rxm` adds nothing to it.
        Ok(if is_dead { Self::Poll } else { Self::Descriptor })
    }
}

const RXM_VARIABLE: &str = "FI_OFI_RXM_DEF_WAIT_OBJ";
const TCP_VARIABLE: &str = "FI_OFI_RXM_DEF_TCP_WAIT_OBJ";

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "tcp;ofi_rxm";

    #[test]
    fn queues_have_descriptors_unless_somebody_wants_to_look() {
        assert_eq!(WaitMode::choose(TCP, None, None, None), Ok(WaitMode::Descriptor));
        assert_eq!(WaitMode::choose(TCP, Some("descriptor"), None, None), Ok(WaitMode::Descriptor));
        assert_eq!(WaitMode::choose("shm", Some("poll"), None, None), Ok(WaitMode::Poll));
        let error = WaitMode::choose(TCP, Some("fd"), None, None).unwrap_err();
        assert!(error.contains(WAIT_VARIABLE) && error.contains("`fd`"), "{error}");
    }

    #[test]
    fn descriptors_that_never_fire_are_not_slept_on() {
        assert_eq!(WaitMode::choose(TCP, None, None, Some("pollfd")), Ok(WaitMode::Poll));
        assert_eq!(WaitMode::choose(TCP, None, Some("PollFD"), None), Ok(WaitMode::Poll));
        assert_eq!(
            WaitMode::choose(TCP, None, Some("pollfd"), Some("fd")),
            Ok(WaitMode::Descriptor)
        );
        let verbs = "verbs;ofi_rxm";
        assert_eq!(WaitMode::choose(verbs, None, None, Some("pollfd")), Ok(WaitMode::Descriptor));
        assert_eq!(WaitMode::choose(verbs, None, Some("pollfd"), None), Ok(WaitMode::Poll));
        assert_eq!(
            WaitMode::choose("shm", None, Some("pollfd"), Some("pollfd")),
            Ok(WaitMode::Descriptor)
        );
    }
}
