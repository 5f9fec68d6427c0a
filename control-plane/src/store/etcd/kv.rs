//! Keys, transactions and leases of etcd, as far as the control plane uses them.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{EtcdClient, EtcdError, bytes, encoded, number};

/// One key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub(crate) key: Vec<u8>,
    #[serde(deserialize_with = "bytes")]
    pub(crate) value: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub(crate) create_revision: i64,
    #[serde(deserialize_with = "number")]
    pub(crate) mod_revision: i64,
}

/// Answer to a read of keys.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Range {
    pub(crate) header: Header,
    pub(crate) kvs: Vec<KeyValue>,
}

/// Head of every answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Header {
    #[serde(deserialize_with = "number")]
    pub(crate) revision: i64,
}

/// Answer to a transaction.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Transaction {
    pub(crate) header: Header,
    /// True if every comparison held.
    pub(crate) succeeded: bool,
    responses: Vec<TransactionPart>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TransactionPart {
    response_range: Option<Range>,
}

impl Transaction {
    /// The keys that the reads of the transaction found, in their order.
    pub(crate) fn found(&self) -> impl Iterator<Item = Option<&KeyValue>> {
        self.responses
            .iter()
            .filter_map(|part| part.response_range.as_ref())
            .map(|range| range.kvs.first())
    }
}

impl EtcdClient {
    /// Reads one key, at a revision of the past unless it is 0.
    pub(crate) async fn get(
        &self,
        key: &str,
        revision: i64,
        bound: Duration,
    ) -> Result<Range, EtcdError> {
        let body = json!({ "key": encoded(key), "revision": revision.to_string() });
        self.call("kv/range", &body, bound).await
    }

    /// Up to `limit` keys that begin with `prefix`, oldest first.
    pub(crate) async fn list(
        &self,
        prefix: &str,
        limit: u32,
        with_values: bool,
        bound: Duration,
    ) -> Result<Range, EtcdError> {
        let body = json!({
            "key": encoded(prefix),
            "range_end": encoded(end_of(prefix)),
            "limit": limit.to_string(),
            "sort_order": "ASCEND",
            "sort_target": "CREATE",
            "keys_only": !with_values,
        });
        self.call("kv/range", &body, bound).await
    }

    pub(crate) async fn transaction(
        &self,
        compare: &[Value],
        success: &[Value],
        failure: &[Value],
        bound: Duration,
    ) -> Result<Transaction, EtcdError> {
        let body = json!({ "compare": compare, "success": success, "failure": failure });
        self.call("kv/txn", &body, bound).await
    }
}

/// Holds if the key was last changed at `revision`; 0 stands for a key that does not exist.
pub(crate) fn is_modified_at(key: &str, revision: u64) -> Value {
    json!({ "target": "MOD", "result": "EQUAL", "key": encoded(key), "mod_revision": revision.to_string() })
}

/// Holds if the key was created at `revision` and exists since then.
pub(crate) fn is_created_at(key: &[u8], revision: i64) -> Value {
    json!({ "target": "CREATE", "result": "EQUAL", "key": encoded(key), "create_revision": revision.to_string() })
}

pub(crate) fn put(key: &str, value: &[u8]) -> Value {
    json!({ "request_put": { "key": encoded(key), "value": encoded(value) } })
}

pub(crate) fn read(key: impl AsRef<[u8]>) -> Value {
    json!({ "request_range": { "key": encoded(key) } })
}

/// Deletes the keys from `first` up to but without `end`.
pub(crate) fn delete(first: &str, end: impl AsRef<[u8]>) -> Value {
    json!({ "request_delete_range": { "key": encoded(first), "range_end": encoded(end) } })
}

/// The first key behind all keys that begin with `prefix`.
pub(crate) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // UTF-8 has no byte 0xff.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}
