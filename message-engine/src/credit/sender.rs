//! The sending half: what may go now, and what the receiver is to be told.

use super::{Credit, CreditConfig, CreditError, Demand, within};

/// How a message may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a scheduled message has to be announced"]
pub enum Admission {
    /// At once and whole. It is counted as sent.
    Unscheduled,
    /// As far as [`CreditSender::allowance`] reaches, once the receiver was told the demand.
    Scheduled(Demand),
}

/// One sender's view of one receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreditSender {
    unscheduled_bytes: u64,
    max_demand_bytes: u64,
    demand: Demand,
    sent: u64,
    unscheduled_sent: u64,
    credit: Credit,
}

impl CreditSender {
    /// A sender that has sent nothing yet.
    #[must_use]
    pub const fn new(config: &CreditConfig) -> Self {
        Self {
            unscheduled_bytes: config.unscheduled_bytes,
            max_demand_bytes: config.max_demand_bytes,
            demand: Demand { announced: 0, withdrawn: 0 },
            sent: 0,
            unscheduled_sent: 0,
            credit: Credit { granted: 0, unscheduled: config.unscheduled_bytes },
        }
    }

    /// Decides how a message of `len` bytes goes. An empty one needs no credit.
    ///
    /// # Errors
    /// [`CreditError::Excess`] when the receiver takes no demand as large as it would become; try again
    /// when more of it has been sent.
    pub fn submit(&mut self, len: u64) -> Result<Admission, CreditError> {
        if len <= self.unscheduled_allowance() {
            self.unscheduled_sent += len;
            return Ok(Admission::Unscheduled);
        }
        // The counter itself ends after 16 EiB.
        let limit = (self.max_demand_bytes.saturating_sub(self.backlog()))
            .min(u64::MAX - self.demand.announced);
        if len > limit {
            return Err(CreditError::Excess { op: "announce", found: len, limit });
        }
        self.demand.announced += len;
        Ok(Admission::Scheduled(self.demand))
    }

    /// Takes in what the receiver says.
    ///
    /// # Errors
    /// [`CreditError::Impossible`].
    pub const fn on_credit(&mut self, credit: Credit) -> Result<(), CreditError> {
        let high = self.demand.announced;
        if let Err(error) = within("granted", credit.granted, self.credit.granted, high) {
            return Err(error);
        }
        let high = self.unscheduled_sent.saturating_add(self.unscheduled_bytes);
        let low = self.credit.unscheduled;
        if let Err(error) = within("unscheduled", credit.unscheduled, low, high) {
            return Err(error);
        }
        self.credit = credit;
        Ok(())
    }

    /// Scheduled bytes that may be sent now.
    #[must_use]
    pub const fn allowance(&self) -> u64 {
        // What was withdrawn may be ahead of what was granted.
        let granted = self.credit.granted.saturating_sub(self.sent + self.demand.withdrawn);
        if granted < self.backlog() { granted } else { self.backlog() }
    }

    /// Counts `bytes` of the allowance as sent.
    ///
    /// # Errors
    /// [`CreditError::Excess`] beyond the allowance.
    pub const fn sent(&mut self, bytes: u64) -> Result<(), CreditError> {
        let limit = self.allowance();
        if bytes > limit {
            return Err(CreditError::Excess { op: "send", found: bytes, limit });
        }
        self.sent += bytes;
        Ok(())
    }

    /// Gives up `bytes` that were announced and not sent. The receiver is to be told the result.
    ///
    /// # Errors
    /// [`CreditError::Excess`] beyond the backlog.
    pub const fn withdraw(&mut self, bytes: u64) -> Result<Demand, CreditError> {
        let limit = self.backlog();
        if bytes > limit {
            return Err(CreditError::Excess { op: "withdraw", found: bytes, limit });
        }
        self.demand.withdrawn += bytes;
        Ok(self.demand)
    }

    /// Bytes announced and neither sent nor withdrawn.
    #[must_use]
    pub const fn backlog(&self) -> u64 {
        self.demand.announced - self.demand.withdrawn - self.sent
    }

    /// Unscheduled bytes that may be sent now.
    #[must_use]
    pub const fn unscheduled_allowance(&self) -> u64 {
        self.credit.unscheduled - self.unscheduled_sent
    }

    /// What the receiver is to be told.
    #[must_use]
    pub const fn demand(&self) -> Demand {
        self.demand
    }
}
