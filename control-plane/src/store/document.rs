//! The snapshot as bytes: one ASCII line `switchyard-state FORMAT REVISION LENGTH CRC32C` (the checksum in hex, over
//! the body), then `LENGTH` bytes of JSON.

use std::path::Path;

use super::{Revision, Snapshot, StoreError};

pub(super) fn encode(
    place: &Path,
    snapshot: &Snapshot,
    revision: Revision,
) -> Result<Vec<u8>, StoreError> {
    let body = serde_json::to_vec(snapshot)
        .map_err(|err| StoreError::Corrupt { path: place.to_owned(), reason: err.to_string() })?;
    let checksum = crc32c::crc32c(&body);
    let (length, revision) = (body.len(), revision.0);
    let mut bytes = format!("{MAGIC} {FORMAT} {revision} {length} {checksum:08x}\n").into_bytes();
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

pub(super) fn decode(place: &Path, bytes: &[u8]) -> Result<(Snapshot, Revision), StoreError> {
    let corrupt =
        |reason: &str| StoreError::Corrupt { path: place.to_owned(), reason: reason.to_owned() };
    let head_end = bytes.iter().take(MAX_HEAD_BYTES).position(|&byte| byte == b'\n');
    let head_end = head_end.ok_or_else(|| corrupt("no header line"))?;
    let (head, body) = (&bytes[..head_end], &bytes[head_end + 1..]);
    let head = std::str::from_utf8(head).map_err(|_| corrupt("the header is not ASCII"))?;
    let mut words = head.split(' ');
    if words.next() != Some(MAGIC) {
        return Err(corrupt("the header names another kind of file"));
    }
    let format = words.next().and_then(|word| word.parse::<u32>().ok());
    let format = format.ok_or_else(|| corrupt("no format number"))?;
    if format != FORMAT {
        let (path, found) = (place.to_owned(), format);
        return Err(StoreError::Format { path, found, supported: FORMAT });
    }
    let revision = words.next().and_then(|word| word.parse::<u64>().ok());
    let length = words.next().and_then(|word| word.parse::<usize>().ok());
    let checksum = words.next().and_then(|word| u32::from_str_radix(word, 16).ok());
    let (Some(revision), Some(length), Some(checksum), None) =
        (revision, length, checksum, words.next())
    else {
        return Err(corrupt("the header is malformed"));
    };
    if body.len() != length {
        return Err(corrupt(&format!("{} bytes of {length}", body.len())));
    }
    if crc32c::crc32c(body) != checksum {
        return Err(corrupt("the checksum does not match"));
    }
    let snapshot: Snapshot =
        serde_json::from_slice(body).map_err(|err| corrupt(&err.to_string()))?;
    snapshot.check().map_err(|reason| corrupt(&reason))?;
    Ok((snapshot, Revision(revision)))
}

const MAGIC: &str = "switchyard-state";
const FORMAT: u32 = 1;
const MAX_HEAD_BYTES: usize = 128;
