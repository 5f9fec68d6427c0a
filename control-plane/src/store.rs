//! Where the control plane's state survives a restart.
//!
//! A store holds one snapshot and replaces it atomically, guarded by a revision: exactly what a
//! transaction on one key of etcd offers, so that engine fits behind the same trait. Leader
//! election and watches are the engine's business.

mod file;
mod memory;

#[cfg(test)]
mod conformance;

use std::fmt;
use std::io;
use std::path::PathBuf;

use control_api::{MemberId, ModelDescriptor};
use serde::{Deserialize, Serialize};

pub use crate::member::{MemberRecord, Phase, Superseded};
pub use file::FileStore;
pub use memory::MemoryStore;

/// Everything that must survive a restart. Leases are not in it: after a restart every leased
/// member gets one fresh time to live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Identity of the cluster.
    pub cluster_id: String,
    /// No epoch above this has been issued by anybody who has seen this snapshot or an older one.
    pub reserved_epoch: u64,
    /// The model, once a member has registered.
    pub model: Option<ModelDescriptor>,
    /// Members, expired ones included.
    pub members: Vec<MemberRecord>,
}

impl Snapshot {
    /// The state of a cluster that is just being founded.
    pub fn fresh(cluster_id: String) -> Self {
        Self { cluster_id, reserved_epoch: 0, model: None, members: Vec::new() }
    }

    /// Checks what a control plane relies on beyond the types.
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
        Ok(())
    }
}

/// Version of the stored snapshot: 0 = nothing stored yet, then rising with every write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// A place for one snapshot. Methods may block on I/O and are called off the async threads.
pub trait Store: fmt::Debug + Send + 'static {
    /// Short name for status and logs, such as `snapshot`.
    fn kind(&self) -> &'static str;

    /// The stored snapshot and its revision; `None` and revision 0 for a fresh store. Never
    /// passes off damaged contents as a fresh store.
    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError>;

    /// Replaces the snapshot if `expected` is still its revision. On success the snapshot is
    /// durable and the new revision is higher. On an error either the old or the new snapshot
    /// is stored, never a mixture, and the same write may be tried again; after
    /// [`StoreError::Conflict`] another control plane is in charge and this one must stop.
    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError>;
}

/// Why a store could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process uses the same data.
    #[error(
        "data directory {} is in use by another control plane: stop it or choose another directory",
        path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The contents are damaged.
    #[error(
        "{} is damaged ({reason}): restore it from a backup, or move it away to found a new \
         cluster, which clients and members will join anew",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The contents were written by a newer version.
    #[error("{} has format {found}, this version reads {supported}: use the version that wrote it", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Format of the file.
        found: u32,
        /// Format that this version reads.
        supported: u32,
    },
    /// Somebody else has written in between.
    #[error(
        "the stored state has revision {found}, expected {expected}: another control plane is in charge"
    )]
    Conflict {
        /// Revision that the writer had seen last.
        expected: u64,
        /// Revision found.
        found: u64,
    },
    /// No space or quota left.
    #[error("no space left to write {}: free some, writing resumes by itself", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        source: io::Error,
    },
    /// Any other failure of the operating system.
    #[error("{operation} {} failed: {source}", path.display())]
    Io {
        /// Name of the call.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        source: io::Error,
    },
}
