//! The token file: names and roles of bearer tokens, with their hashes.
//!
//! The file has one JSON object a line. Empty lines and lines that begin with `#` are comments:
//!
//! ```text
//! {"name":"gpu-7","role":"server","sha256":"9f86d081…","expires":"2027-01-31T00:00:00Z"}
//! ```
//!
//! The file never holds a token. A token has 256 random bits, so its plain SHA-256 cannot be searched for. A name may
//! have several tokens at a time, all of the same role: that is how tokens are rotated.

mod file;

use std::collections::HashMap;
use std::fmt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Credential, Identity, Role};
pub use file::{TokenFileError, add, read, remove};

/// SHA-256 of a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of `token`.
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// The first 8 hex digits: names a token to people and tells nothing about it.
    pub fn id(&self) -> String {
        self.to_string()[..8].to_owned()
    }

    /// Reads 64 hex digits.
    fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |byte: u8| char::from(byte).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some(Self(hash))
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenHash({}…)", self.id())
    }
}

/// A new token of 256 random bits: `sy_` and 64 hex digits. Show it once and keep its hash only.
pub fn generate() -> String {
    let bits: [u8; 32] = rand::random();
    bits.iter().fold("sy_".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

/// One token of a token file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenEntry {
    /// Name of the holder: 1 to 128 visible ASCII characters. Several tokens may have the same name.
    pub name: String,
    /// Rights of the holder.
    pub role: Role,
    /// Hash of the token.
    pub hash: TokenHash,
    /// Time from which on the token is refused. `None` for a token without an end.
    pub expires: Option<SystemTime>,
}

impl TokenEntry {
    /// An entry for `token`.
    ///
    /// # Errors
    /// [`BadName`].
    pub fn new(
        name: &str,
        role: Role,
        token: &str,
        expires: Option<SystemTime>,
    ) -> Result<Self, BadName> {
        check_name(name)?;
        let hash = TokenHash::of(token.as_bytes());
        Ok(Self { name: name.to_owned(), role, hash, expires })
    }

    /// Returns true if the token is refused at `now` because of its age.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|end| now >= end)
    }

    /// The end in RFC 3339, such as `2027-01-31T00:00:00Z`.
    pub fn expires_text(&self) -> Option<String> {
        self.expires.map(|end| humantime::format_rfc3339_seconds(end).to_string())
    }

    /// The entry's line in the file, without the line break.
    fn to_line(&self) -> String {
        let line = Line {
            name: self.name.clone(),
            role: self.role.name().to_owned(),
            sha256: self.hash.to_string(),
            expires: self.expires_text(),
        };
        serde_json::to_string(&line).unwrap_or_default()
    }

    fn from_line(text: &str) -> Result<Self, String> {
        // The parser's own message can quote the line, in which a token may stand by mistake.
        let line: Line = serde_json::from_str(text).map_err(|err| {
            format!("not a token's entry (column {}): expected {EXPECTED}", err.column())
        })?;
        check_name(&line.name).map_err(|err| err.to_string())?;
        let role = line.role.parse::<Role>().map_err(|err| err.to_string())?;
        let hash = TokenHash::parse(&line.sha256)
            .ok_or_else(|| "the field sha256 is not a hash: expected 64 hex digits".to_owned())?;
        let expires = line.expires.map(|text| parse_time(&text)).transpose()?;
        Ok(Self { name: line.name, role, hash, expires })
    }
}

/// An entry as it is in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    name: String,
    role: String,
    sha256: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires: Option<String>,
}

/// A name that no token may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a name of {length} bytes that is empty, too long, or has other characters: expected 1 to 128 visible ASCII characters"
)]
pub struct BadName {
    length: usize,
}

fn check_name(name: &str) -> Result<(), BadName> {
    let length = name.len();
    match (1..=MAX_NAME_BYTES).contains(&length) && name.bytes().all(|byte| byte.is_ascii_graphic())
    {
        true => Ok(()),
        false => Err(BadName { length }),
    }
}

fn parse_time(text: &str) -> Result<SystemTime, String> {
    humantime::parse_rfc3339(text).map_err(|_| {
        let found: String = text.chars().take(40).collect();
        format!("the field expires has {found:?}: expected UTC, such as 2027-01-31T00:00:00Z")
    })
}

/// The tokens of one file.
#[derive(Clone, Debug, Default)]
pub struct TokenTable {
    entries: Vec<TokenEntry>,
    by_hash: HashMap<TokenHash, usize>,
}

impl TokenTable {
    /// Reads the text of a token file.
    ///
    /// # Errors
    /// [`TokenTableError`] with the first line that is wrong. The message never quotes a token.
    pub fn parse(text: &str) -> Result<Self, TokenTableError> {
        let mut table = Self::default();
        let mut roles: HashMap<String, Role> = HashMap::new();
        for (line_idx, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |reason| TokenTableError::Line { line: line_idx + 1, reason };
            let entry = TokenEntry::from_line(line).map_err(wrong)?;
            let known = *roles.entry(entry.name.clone()).or_insert(entry.role);
            if known != entry.role {
                let (name, role) = (&entry.name, entry.role);
                return Err(wrong(format!(
                    "{name} has the role {role} here and {known} in a line before: a name has one role"
                )));
            }
            if table.by_hash.insert(entry.hash, table.entries.len()).is_some() {
                return Err(wrong("the same token is in a line before".to_owned()));
            }
            table.entries.push(entry);
        }
        if table.entries.is_empty() {
            return Err(TokenTableError::Empty);
        }
        Ok(table)
    }

    /// The entries in the order of the file.
    pub fn entries(&self) -> &[TokenEntry] {
        &self.entries
    }

    /// Returns true if a token with this hash is valid at `now`.
    pub fn has(&self, hash: &TokenHash, now: SystemTime) -> bool {
        self.by_hash.get(hash).is_some_and(|&idx| !self.entries[idx].has_expired(now))
    }

    /// The identity of the holder of `token`.
    ///
    /// # Errors
    /// [`TokenRefusal`].
    pub fn identify(&self, token: &[u8], now: SystemTime) -> Result<Identity, TokenRefusal> {
        // The search takes a time that depends on the hash, which tells nothing about the token.
        let entry = self.by_hash.get(&TokenHash::of(token)).map(|&idx| &self.entries[idx]);
        let entry = entry.ok_or(TokenRefusal::Unknown)?;
        if entry.has_expired(now) {
            let at = entry.expires_text().unwrap_or_default();
            return Err(TokenRefusal::Expired { name: entry.name.clone(), at });
        }
        Ok(Identity { name: entry.name.clone(), role: entry.role, credential: Credential::Token })
    }
}

/// Reason to refuse a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TokenRefusal {
    /// No entry has its hash.
    #[error("the token is wrong")]
    Unknown,
    /// Its time is over.
    #[error("the token of {name} expired at {at}: ask an operator for a new one")]
    Expired { name: String, at: String },
}

/// Error of reading the text of a token file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TokenTableError {
    /// A line is wrong.
    #[error("line {line}: {reason}")]
    Line { line: usize, reason: String },
    /// No line has a token.
    #[error("it has no token: add one with `switchyard token new`")]
    Empty,
}

const MAX_NAME_BYTES: usize = 128;
const EXPECTED: &str = r#"{"name":"…","role":"server|client|operator|viewer","sha256":"64 hex digits"} and "expires" in UTC if the token ends"#;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_token_is_found_by_its_hash_until_it_expires() {
        let (lasting, ending) = (generate(), generate());
        assert_ne!(lasting, ending);
        assert_eq!(lasting.len(), 3 + 64);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let end = now + Duration::from_secs(60);
        let entries = [
            TokenEntry::new("gpu-7", Role::Server, &lasting, None).unwrap(),
            TokenEntry::new("gpu-7", Role::Server, &ending, Some(end)).unwrap(),
        ];
        let text = format!("# tokens\n\n{}\n{}\n", entries[0].to_line(), entries[1].to_line());
        assert!(!text.contains(&lasting) && !text.contains(&ending));
        let table = TokenTable::parse(&text).unwrap();
        assert_eq!(table.entries(), entries);
        let identity = table.identify(lasting.as_bytes(), now).unwrap();
        assert_eq!((identity.name.as_str(), identity.role), ("gpu-7", Role::Server));
        assert!(table.identify(ending.as_bytes(), now).is_ok());
        let refusal = table.identify(ending.as_bytes(), end).unwrap_err().to_string();
        assert!(refusal.contains("gpu-7") && refusal.contains("2027-01-15"), "{refusal}");
        for wrong in ["", &lasting[1..], &format!("{lasting} ")] {
            assert_eq!(table.identify(wrong.as_bytes(), now), Err(TokenRefusal::Unknown));
        }
    }

    #[test]
    fn a_wrong_file_names_the_line_and_never_the_secret() {
        let secret = generate();
        let good = TokenEntry::new("a", Role::Viewer, &secret, None).unwrap().to_line();
        let hash = TokenHash::of(b"x");
        let cases = [
            (secret.clone(), "line 2: not a token's entry"),
            (format!("{secret:?}"), "line 2: not a token's entry"),
            (
                format!("{{\"name\":\"b\",\"role\":\"viewer\",\"sha256\":\"{secret}\"}}"),
                "64 hex digits",
            ),
            (format!("{{\"name\":\"b\",\"role\":\"root\",\"sha256\":\"{hash}\"}}"), "unknown role"),
            (
                format!("{{\"name\":\"b c\",\"role\":\"viewer\",\"sha256\":\"{hash}\"}}"),
                "visible ASCII",
            ),
            (format!("{{\"name\":\"a\",\"role\":\"client\",\"sha256\":\"{hash}\"}}"), "one role"),
            (
                format!(
                    "{{\"name\":\"b\",\"role\":\"viewer\",\"sha256\":\"{hash}\",\"expires\":\"soon\"}}"
                ),
                "expected UTC",
            ),
            (
                format!(
                    "{{\"name\":\"b\",\"role\":\"viewer\",\"sha256\":\"{hash}\",\"token\":\"{secret}\"}}"
                ),
                "not a token's entry",
            ),
            (good.clone(), "line before"),
        ];
        for (line, expected) in cases {
            let err = TokenTable::parse(&format!("{good}\n{line}\n")).unwrap_err().to_string();
            assert!(err.contains("line 2") && err.contains(expected), "{err}");
            assert!(!err.contains(&secret), "{err}");
        }
        assert_eq!(TokenTable::parse("# none\n").unwrap_err(), TokenTableError::Empty);
    }
}
