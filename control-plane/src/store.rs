//! Durable state of the control plane.
//!
//! A store holds one snapshot and replaces it atomically, guarded by a revision. Leader election and watches of
//! etcd are outside of the trait.

mod document;
pub(crate) mod editions;
mod epoch_file;
pub(crate) mod etcd;
mod file;
mod memory;

#[cfg(test)]
mod conformance;

use std::fmt;
use std::io;
use std::path::PathBuf;

use control_api::{FleetGoals, MemberId, ModelDescriptor};
use serde::{Deserialize, Serialize};

pub use editions::{EditionRecord, PlannedSwitch, Retirement, StoredEdition};

pub use crate::member::{MemberRecord, Phase, Predecessor};
pub use crate::tickets::TicketRecord;
pub use etcd::{EtcdCredentials, EtcdError};
pub use file::FileStore;
pub use memory::MemoryStore;

/// State that survives a restart. It contains no leases: after a restart every leased member gets one
/// fresh time to live.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Identity of the cluster.
    pub cluster_id: String,
    /// Upper bound of all epochs issued by a control plane that loaded this snapshot or an older one.
    pub reserved_epoch: u64,
    /// The model, once a member has registered.
    pub model: Option<ModelDescriptor>,
    /// Members, expired ones included.
    pub members: Vec<MemberRecord>,
    /// Goals that were changed while the control plane ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goals: Option<FleetGoals>,
    /// Public keys of tickets, and the least epoch.
    #[serde(default, skip_serializing_if = "TicketRecord::is_empty")]
    pub tickets: TicketRecord,
    /// The other editions of the model, during an update.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<StoredEdition>,
}

impl Snapshot {
    /// The state of a new cluster.
    pub fn fresh(cluster_id: String) -> Self {
        Self {
            cluster_id,
            reserved_epoch: 0,
            model: None,
            members: Vec::new(),
            goals: None,
            tickets: TicketRecord::default(),
            others: Vec::new(),
        }
    }

    /// Checks the invariants that the types do not express.
    fn check(&self) -> Result<(), String> {
        if self.cluster_id.is_empty() {
            return Err("no cluster id".to_owned());
        }
        let names: std::collections::HashSet<&String> =
            self.members.iter().map(|member| &member.name).collect();
        let ids: std::collections::HashSet<&MemberId> =
            self.members.iter().map(|member| &member.member_id).collect();
        if names.len() != self.members.len() || ids.len() != self.members.len() {
            return Err("two members with the same name or id".to_owned());
        }
        for other in &self.others {
            if !other.snapshot.others.is_empty() {
                return Err("an edition of the model inside of another one".to_owned());
            }
            other.snapshot.check()?;
        }
        Ok(())
    }
}

/// Version of the stored snapshot: 0 = nothing stored yet, then rising with every write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// Storage for one snapshot. Methods may block on I/O; the control plane calls them on blocking threads.
pub trait Store: fmt::Debug + Send + 'static {
    /// Short name for status and logs, such as `snapshot`.
    fn kind(&self) -> &'static str;

    /// The stored snapshot and its revision; `None` and revision 0 for a new store. Damaged contents are
    /// an error, never a new store.
    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError>;

    /// Replaces the snapshot if its revision is still `expected`. On success the snapshot is durable and
    /// the new revision is higher.
    ///
    /// # Errors
    /// After an error the store holds either the old or the new snapshot, never a mixture, and the caller
    /// may retry the same write. After [`StoreError::Conflict`] another control plane is in charge and
    /// this one must stop.
    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError>;

    /// Makes `epoch` a lower bound of [`Snapshot::reserved_epoch`] of every later [`load`](Self::load), without a
    /// new snapshot. Needs no free space if the store has saved a snapshot before, so that epochs can still be
    /// issued on a full disk.
    ///
    /// # Errors
    /// After an error the old bound or the new one holds. The caller may retry.
    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError>;
}

/// Error of a read or write of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum StoreError {
    /// Another process uses the same data.
    #[error(
        "data directory {} is in use by another control plane: stop it or choose another directory",
        path.display()
    )]
    InUse { path: PathBuf },
    /// The contents are damaged.
    #[error(
        "{} is damaged ({reason}): restore it from a backup, or move it away to start a new \
         cluster, which clients and members then join",
        path.display()
    )]
    Corrupt { path: PathBuf, reason: String },
    /// A newer version wrote the contents.
    #[error("{} has format {found}, this version reads {supported}: use the version that wrote it", path.display())]
    Format { path: PathBuf, found: u32, supported: u32 },
    /// Another process has written in between.
    #[error(
        "the stored state has revision {found}, expected {expected}: another control plane is in charge"
    )]
    Conflict { expected: u64, found: u64 },
    /// Another control plane was elected.
    #[error("another control plane leads the fleet: this one no longer writes")]
    Deposed,
    /// Another program keeps data where the store should be.
    #[error(
        "etcd has data of another program under the prefix {prefix}, such as the key {key}: choose a prefix of its \
         own, or delete the key if it is not needed"
    )]
    Foreign { prefix: String, key: String },
    /// etcd cannot be used.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// No space or quota left.
    #[error("no space left to write {}: free some space, and writing resumes by itself", path.display())]
    Full { path: PathBuf, source: io::Error },
    /// Any other failure of the operating system.
    #[error("{operation} {} failed: {source}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}
