//! The sending half: the bytes that may be sent now, and the demand to report.

use super::{Credit, CreditConfig, CreditError, Demand, within};

/// Permission to send a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a scheduled message has to be announced"]
pub enum Admission {
    /// The sender may send it at once and whole. It counts as sent.
    Unscheduled,
    /// The sender reports the demand, and may then send as far as [`CreditSender::allowance`] reaches.
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

    /// Submits a message of `len` bytes. An empty one needs no credit.
    ///
    /// # Errors
    /// [`CreditError::Excess`] if the demand would exceed the receiver's limit. The caller retries when more of it has
    /// been sent.
    pub fn submit(&mut self, len: u64) -> Result<Admission, CreditError> {
        if len <= self.unscheduled_allowance() {
            self.unscheduled_sent += len;
            return Ok(Admission::Unscheduled);
        }
        // The counter overflows at 16 EiB.
        let limit = (self.max_demand_bytes.saturating_sub(self.backlog()))
            .min(u64::MAX - self.demand.announced);
        if len > limit {
            return Err(CreditError::Excess { op: "announce", found: len, limit });
        }
        self.demand.announced += len;
        Ok(Admission::Scheduled(self.demand))
    }

    /// Handles a report of the receiver.
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
        // Withdrawn bytes may exceed the granted ones.
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

    /// Withdraws `bytes` that were announced and not sent. The caller reports the result to the receiver.
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

    /// Demand to report to the receiver.
    #[must_use]
    pub const fn demand(&self) -> Demand {
        self.demand
    }
}
