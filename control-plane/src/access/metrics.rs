//! Metrics about callers, their requests and the audit log.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::metrics::names;

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct AccessMetrics {
    /// Requests refused, by reason.
    refused: IntCounterVec,
    pub(crate) token_file_valid: IntGauge,
    pub(crate) audit_lost: IntCounter,
}

/// Reason to refuse a request before its route sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalReason {
    /// The identity is missing or wrong.
    Unauthorized,
    /// The role does not allow it.
    Forbidden,
    /// The address sends too many requests.
    AddressRate,
    /// The identity sends too many requests.
    IdentityRate,
    /// The member sends too many requests.
    MemberRate,
    /// The bodies of the caller's requests hold too much memory.
    BodyMemory,
}

impl RefusalReason {
    const ALL: [Self; 6] = [
        Self::Unauthorized,
        Self::Forbidden,
        Self::AddressRate,
        Self::IdentityRate,
        Self::MemberRate,
        Self::BodyMemory,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::AddressRate => "address_rate",
            Self::IdentityRate => "identity_rate",
            Self::MemberRate => "member_rate",
            Self::BodyMemory => "body_memory",
        }
    }
}

impl AccessMetrics {
    /// Registers the metrics. An error means that two metrics have the same name, which is a bug.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let refused = IntCounterVec::new(
            Opts::new(
                names::REFUSED_REQUESTS_TOTAL,
                "Requests refused before their route saw them, by reason: unauthorized (no or a wrong identity), forbidden (wrong role or another server's member), address_rate, identity_rate, member_rate (too many requests). With body_memory, too many large requests came at a time.",
            ),
            &["reason"],
        )?;
        let token_file_valid = IntGauge::new(
            names::TOKEN_FILE_VALID,
            "1 while the token file can be used, or none is set. 0 while it is wrong or unreadable: then the tokens read before stay in force.",
        )?;
        let audit_lost = IntCounter::new(
            names::AUDIT_LOST_TOTAL,
            "Entries of the audit log that could not be written to its file.",
        )?;
        registry.register(Box::new(refused.clone()))?;
        registry.register(Box::new(token_file_valid.clone()))?;
        registry.register(Box::new(audit_lost.clone()))?;
        for reason in RefusalReason::ALL {
            refused.with_label_values(&[reason.name()]);
        }
        token_file_valid.set(1);
        Ok(Self { refused, token_file_valid, audit_lost })
    }

    pub(crate) fn count_refusal(&self, reason: RefusalReason) {
        self.refused.with_label_values(&[reason.name()]).inc();
    }
}
