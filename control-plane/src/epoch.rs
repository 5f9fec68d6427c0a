//! Epochs that are never issued twice, even if the store loses its last write.

/// Issues epochs from a range that is reserved in the store.
///
/// Every snapshot carries a reservation: an upper bound of all epochs issued so far. A process that
/// starts from a snapshot issues only epochs above its reservation. Epochs are issued only up to the
/// reservation of the *last but one* successful write. So the next epoch is unused even if the store
/// loses its last write. A disk that reports writes too early can lose it, and so can a snapshot restored by
/// hand.
#[derive(Clone, Debug)]
pub(crate) struct EpochAllocator {
    issued: u64,
    /// Largest epoch that may be issued.
    usable: u64,
    /// Reservation of the last successful write.
    durable: u64,
}

impl EpochAllocator {
    /// Continues above a reservation found in the store, 0 for a new one. No epoch can be issued before
    /// two writes have succeeded.
    pub(crate) fn resume(reservation: u64) -> Self {
        Self { issued: reservation, usable: reservation, durable: reservation }
    }

    /// The next epoch, or `None` while no reserved epoch is left.
    pub(crate) fn issue(&mut self) -> Option<u64> {
        if self.issued >= self.usable {
            return None;
        }
        self.issued += 1;
        Some(self.issued)
    }

    /// The reservation to write with the next snapshot.
    pub(crate) fn reservation(&self) -> u64 {
        self.durable.max(self.issued.saturating_add(CHUNK))
    }

    /// Records that a snapshot with this reservation is durable.
    pub(crate) fn mark_saved(&mut self, reservation: u64) {
        self.usable = self.usable.max(self.durable);
        self.durable = self.durable.max(reservation);
    }

    /// Records that `reservation` is durable although no snapshot could be written: see
    /// [`Store::reserve_epoch`](crate::store::Store::reserve_epoch). Such a reservation is written in place and
    /// synced, so all of it may be used at once.
    pub(crate) fn mark_reserved(&mut self, reservation: u64) {
        self.durable = self.durable.max(reservation);
        self.usable = self.usable.max(reservation);
    }

    /// Returns true if a write is due to reserve more epochs, even if nothing else has changed.
    pub(crate) fn needs_save(&self) -> bool {
        self.usable - self.issued < CHUNK / 2
    }
}

/// Epochs reserved ahead. So many can still be issued while the store refuses writes.
const CHUNK: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_issued_before_two_writes() {
        let mut epochs = EpochAllocator::resume(0);
        assert_eq!(epochs.issue(), None);
        epochs.mark_saved(epochs.reservation());
        assert_eq!(epochs.issue(), None);
        assert!(epochs.needs_save());
        epochs.mark_saved(epochs.reservation());
        assert!(!epochs.needs_save());
        assert_eq!(epochs.issue(), Some(1));
    }

    #[test]
    fn a_store_that_refuses_writes_ends_the_supply() {
        let mut epochs = EpochAllocator::resume(0);
        epochs.mark_saved(epochs.reservation());
        epochs.mark_saved(epochs.reservation());
        let issued: Vec<u64> = std::iter::from_fn(|| epochs.issue()).collect();
        assert_eq!(issued, (1..=CHUNK).collect::<Vec<_>>());
        assert!(epochs.needs_save());
    }

    /// Crashes at random moments. The restart finds the last write or, if that was lost, the one before.
    /// No epoch may be issued twice, and none may be lower than an earlier one.
    #[test]
    fn no_crash_and_no_lost_write_issues_an_epoch_twice() {
        use rand::{RngExt, SeedableRng};
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        // The reservations on disk, oldest first.
        let mut disk = vec![0];
        let mut epochs = EpochAllocator::resume(0);
        let mut last = 0;
        for _ in 0..200_000 {
            match rng.random_range(0..100u32) {
                0..70 => {
                    if let Some(epoch) = epochs.issue() {
                        assert!(epoch > last, "epoch {epoch} after {last}");
                        last = epoch;
                    }
                }
                70..90 => {
                    let reservation = epochs.reservation();
                    disk.push(reservation);
                    epochs.mark_saved(reservation);
                }
                // Killed between the write and its confirmation. The write may have reached the disk.
                90..96 => {
                    if rng.random_bool(0.5) {
                        disk.push(epochs.reservation());
                    }
                    epochs = EpochAllocator::resume(disk[disk.len() - 1]);
                }
                _ => {
                    if disk.len() > 1 && rng.random_bool(0.5) {
                        disk.pop();
                    }
                    epochs = EpochAllocator::resume(disk[disk.len() - 1]);
                    // At most one write may be lost, so the new process writes at once.
                    let reservation = epochs.reservation();
                    disk.push(reservation);
                    epochs.mark_saved(reservation);
                }
            }
        }
        assert!(last > 10_000);
    }
}
