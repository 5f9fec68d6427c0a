//! The store in etcd, for several control planes of one fleet.
//!
//! Keys under the prefix: `snapshot` is the head, one ASCII line `switchyard-head FORMAT NONCE CHUNKS` and, if CHUNKS is
//! 0, the document of the snapshot. A larger document lies in `chunks/NONCE/NUMBER`, because etcd limits the size of a
//! request. The head is replaced last, so a reader sees the old document or the new one. `reserved-epoch` holds epochs
//! that were reserved without a snapshot. `election/` belongs to etcd's election.
//!
//! Every write is a transaction that holds only while the key of this leader exists, with the revision of its
//! creation. A control plane that leads no longer can therefore write nothing.

mod client;
mod kv;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Handle;

pub(crate) use client::{EtcdClient, bytes as kv_bytes, encoded, number as kv_number};
pub use client::{EtcdCredentials, EtcdError};
pub(crate) use kv::{KeyValue, end_of};

use super::{Revision, Snapshot, Store, StoreError, document};

/// Proof of leadership: the key that etcd's election made for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(crate) key: Vec<u8>,
    pub(crate) create_revision: i64,
}

/// A snapshot in etcd. Its methods block, so they must not run on a thread that drives asynchronous tasks.
#[derive(Debug)]
pub(crate) struct EtcdStore {
    client: Arc<EtcdClient>,
    /// Ends with a slash.
    prefix: String,
    handle: Handle,
    /// `None` only in tests: then every writer may write.
    fence: Option<Fence>,
    /// First half of this writer's nonces.
    writer: String,
    num_writes: u64,
    /// True after a write without an answer. etcd may have carried it out, or may do so later.
    is_unsure: bool,
}

impl EtcdStore {
    pub(crate) fn new(
        client: Arc<EtcdClient>,
        prefix: &str,
        handle: Handle,
        fence: Option<Fence>,
    ) -> Self {
        let writer = format!("{:016x}", rand::random::<u64>());
        let prefix = prefix.to_owned();
        Self { client, prefix, handle, fence, writer, num_writes: 0, is_unsure: false }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn place(&self) -> PathBuf {
        PathBuf::from(format!("etcd key {}", self.key(HEAD)))
    }

    fn compare_fence(&self) -> Vec<Value> {
        let fence = self.fence.iter();
        fence.map(|fence| kv::is_created_at(&fence.key, fence.create_revision)).collect()
    }

    async fn read(&self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        let range = self.client.get(&self.key(HEAD), 0, BOUND).await?;
        let Some(head) = range.kvs.first() else {
            self.check_prefix().await?;
            return Ok((None, Revision::default()));
        };
        let (nonce, num_chunks, inline) = self.parse_head(head)?;
        let mut document = inline;
        for i in 0..num_chunks {
            let chunk =
                self.client.get(&self.chunk(&nonce, i), range.header.revision, BOUND).await?;
            let Some(chunk) = chunk.kvs.into_iter().next() else {
                let reason = format!("chunk {i} of {num_chunks} is missing");
                return Err(StoreError::Corrupt { path: self.place(), reason });
            };
            document.extend_from_slice(&chunk.value);
        }
        let (mut snapshot, _) = document::decode(&self.place(), &document)?;
        let reserved = self.client.get(&self.key(RESERVED), 0, BOUND).await?;
        if let Some(reserved) = reserved.kvs.first() {
            let epoch =
                std::str::from_utf8(&reserved.value).ok().and_then(|text| text.parse().ok());
            let Some(epoch) = epoch else {
                let path = PathBuf::from(format!("etcd key {}", self.key(RESERVED)));
                return Err(StoreError::Corrupt { path, reason: "not a number".to_owned() });
            };
            snapshot.reserved_epoch = snapshot.reserved_epoch.max(epoch);
        }
        Ok((Some(snapshot), Revision(head.mod_revision as u64)))
    }

    /// Nonce, number of chunks, and the document if it is inside.
    fn parse_head(&self, head: &KeyValue) -> Result<(String, u32, Vec<u8>), StoreError> {
        let foreign = || StoreError::Foreign { prefix: self.prefix.clone(), key: self.key(HEAD) };
        let line_end = head.value.iter().take(MAX_HEAD_BYTES).position(|&byte| byte == b'\n');
        let line_end = line_end.ok_or_else(foreign)?;
        let (line, rest) = (&head.value[..line_end], &head.value[line_end + 1..]);
        let words = std::str::from_utf8(line).map_err(|_| foreign())?;
        let words: Vec<&str> = words.split(' ').collect();
        let [MAGIC, format, nonce, num_chunks] = words[..] else { return Err(foreign()) };
        let corrupt = || StoreError::Corrupt {
            path: self.place(),
            reason: "the header is malformed".to_owned(),
        };
        let format: u32 = format.parse().map_err(|_| corrupt())?;
        if format != FORMAT {
            let path = self.place();
            return Err(StoreError::Format { path, found: format, supported: FORMAT });
        }
        let num_chunks = num_chunks.parse().map_err(|_| corrupt())?;
        Ok((nonce.to_owned(), num_chunks, rest.to_vec()))
    }

    /// Refuses a prefix without a snapshot under which another program keeps keys.
    async fn check_prefix(&self) -> Result<(), StoreError> {
        let range = self.client.list(&self.prefix, PREFIX_SAMPLE, false, BOUND).await?;
        // Another control plane may have written the head in the meantime.
        let ours = [HEAD, RESERVED, CHUNKS, ELECTION].map(|name| self.key(name));
        for found in range.kvs {
            let key = String::from_utf8_lossy(&found.key).into_owned();
            if !ours.iter().any(|ours| key.starts_with(ours)) {
                return Err(StoreError::Foreign { prefix: self.prefix.clone(), key });
            }
        }
        Ok(())
    }

    /// The error of a transaction in which the fence or the revision of a key did not hold.
    fn explain_refusal(&self, expected: u64, found: Option<&KeyValue>) -> Result<(), StoreError> {
        match found.map_or(0, |found| found.mod_revision as u64) {
            found if found == expected => Err(StoreError::Deposed),
            found => Err(StoreError::Conflict { expected, found }),
        }
    }

    fn chunk(&self, nonce: &str, index: u32) -> String {
        format!("{}{nonce}/{index:08}", self.key(CHUNKS))
    }

    async fn write(
        &mut self,
        snapshot: &Snapshot,
        expected: Revision,
    ) -> Result<Revision, StoreError> {
        let document = document::encode(&self.place(), snapshot, expected)?;
        self.num_writes += 1;
        let nonce = format!("{}-{}", self.writer, self.num_writes);
        let chunks: Vec<&[u8]> = match document.len() <= MAX_INLINE {
            true => Vec::new(),
            false => document.chunks(CHUNK_BYTES).collect(),
        };
        let mut head = format!("{MAGIC} {FORMAT} {nonce} {}\n", chunks.len()).into_bytes();
        if chunks.is_empty() {
            head.extend_from_slice(&document);
        }
        for (i, chunk) in chunks.iter().enumerate() {
            let put = kv::put(&self.chunk(&nonce, i as u32), chunk);
            let outcome =
                self.client.transaction(&self.compare_fence(), &[put], &[], BOUND).await?;
            if !outcome.succeeded {
                return Err(StoreError::Deposed);
            }
        }
        let chunks_key = self.key(CHUNKS);
        let mine = format!("{chunks_key}{nonce}/");
        let success = [
            kv::put(&self.key(HEAD), &head),
            kv::delete(&chunks_key, &mine),
            kv::delete(&format!("{chunks_key}{nonce}0"), end_of(&chunks_key)),
        ];
        // The revision of the head as this process knows it, which an unanswered write may have changed.
        let mut known = expected;
        loop {
            let mut compare = self.compare_fence();
            compare.push(kv::is_modified_at(&self.key(HEAD), known.0));
            let mut failure = vec![kv::read(self.key(HEAD))];
            failure.extend(self.fence.iter().map(|fence| kv::read(&fence.key)));
            let outcome = self.client.transaction(&compare, &success, &failure, BOUND).await;
            // An error leaves open which of the writes is in the store.
            let outcome = outcome.inspect_err(|_| self.is_unsure = true)?;
            if outcome.succeeded {
                self.is_unsure = false;
                return Ok(Revision(outcome.header.revision as u64));
            }
            let mut found = outcome.found();
            let head = found.next().flatten();
            if let Some(fence) = &self.fence {
                let leader = found.next().flatten();
                if leader.is_none_or(|key| key.create_revision != fence.create_revision) {
                    return Err(StoreError::Deposed);
                }
            }
            let revision = Revision(head.map_or(0, |head| head.mod_revision as u64));
            // Another program's value is no sign of another control plane: this one goes on without the store.
            let written =
                head.map(|head| self.parse_head(head)).transpose()?.map(|(nonce, ..)| nonce);
            if self.fence.is_some() && head.is_none() && known > revision {
                // The key was deleted, and this process still leads: its state is the newest.
                known = revision;
                continue;
            }
            if written.as_ref() == Some(&nonce) {
                // An endpoint carried the write out without an answer, and the next one was asked again.
                self.is_unsure = false;
                return Ok(revision);
            }
            let is_mine = written.is_some_and(|nonce| nonce.starts_with(&self.writer));
            if !(self.is_unsure && is_mine) || revision == known {
                return Err(StoreError::Conflict { expected: expected.0, found: revision.0 });
            }
            known = revision;
        }
    }
}

impl Store for EtcdStore {
    fn kind(&self) -> &'static str {
        "etcd"
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        self.handle.block_on(self.read())
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        let handle = self.handle.clone();
        handle.block_on(self.write(snapshot, expected))
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        let key = self.key(RESERVED);
        let put = kv::put(&key, epoch.to_string().as_bytes());
        self.handle.block_on(async {
            let found = self.client.get(&key, 0, BOUND).await?;
            let found = found.kvs.first();
            let text = found.and_then(|found| std::str::from_utf8(&found.value).ok());
            if text.and_then(|text| text.parse::<u64>().ok()).is_some_and(|found| found >= epoch) {
                return Ok(());
            }
            // A delayed write of a smaller number must not replace a later one.
            let revision = found.map_or(0, |found| found.mod_revision as u64);
            let mut compare = self.compare_fence();
            compare.push(kv::is_modified_at(&key, revision));
            let outcome =
                self.client.transaction(&compare, &[put], &[kv::read(&key)], BOUND).await?;
            match outcome.succeeded {
                true => Ok(()),
                false => self.explain_refusal(revision, outcome.found().next().flatten()),
            }
        })
    }
}

const HEAD: &str = "snapshot";
const RESERVED: &str = "reserved-epoch";
const CHUNKS: &str = "chunks/";
/// Prefix of the keys of etcd's election, whose name is the same without the slash.
pub(crate) const ELECTION: &str = "election/";
const MAGIC: &str = "switchyard-head";
const FORMAT: u32 = 1;
const MAX_HEAD_BYTES: usize = 128;
/// etcd refuses requests above 1.5 MiB by default.
const MAX_INLINE: usize = 1 << 20;
const CHUNK_BYTES: usize = 1 << 20;
const PREFIX_SAMPLE: u32 = 64;
/// Deadline of one call, retries at other endpoints included.
const BOUND: Duration = Duration::from_secs(3);
