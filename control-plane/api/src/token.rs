//! The bearer token of a client, given once or kept in a file.

use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use reqwest::header::HeaderValue;
use tracing::{debug, info};

use crate::error::ConfigError;

/// The token that requests carry.
#[derive(Debug)]
pub(crate) struct TokenSource {
    /// The header, marked as sensitive: its debug form does not show the token.
    header: RwLock<Option<HeaderValue>>,
    path: Option<PathBuf>,
    /// Fixed tokens that are tried in turn when one is refused.
    choice: Vec<HeaderValue>,
}

impl TokenSource {
    /// A token that stays the same.
    pub(crate) fn fixed(token: Option<&str>) -> Result<Self, ConfigError> {
        let header = token.map(header).transpose()?;
        Ok(Self { header: RwLock::new(header), path: None, choice: Vec::new() })
    }

    /// The present token, and another one that is sent if it is refused.
    pub(crate) fn with_fallback(&self, token: &str) -> Result<Self, ConfigError> {
        let current = self.current();
        let choice = current.iter().cloned().chain([header(token)?]).collect();
        Ok(Self { header: RwLock::new(current), path: None, choice })
    }

    /// The token in a file.
    pub(crate) fn file(path: &Path) -> Result<Self, ConfigError> {
        let header = read(path)?;
        let path = Some(path.to_owned());
        Ok(Self { header: RwLock::new(Some(header)), path, choice: Vec::new() })
    }

    pub(crate) fn current(&self) -> Option<HeaderValue> {
        self.header.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The token that is in the file by now or the fallback, if it differs from `refused`.
    pub(crate) async fn read_again(&self, refused: Option<HeaderValue>) -> Option<HeaderValue> {
        // Another request may have read it already.
        let current = self.current();
        if current != refused {
            return current;
        }
        if let Some(other) = self.choice.iter().find(|&token| Some(token) != refused.as_ref()) {
            *self.header.write().unwrap_or_else(PoisonError::into_inner) = Some(other.clone());
            return Some(other.clone());
        }
        let path = self.path.clone()?;
        let task_path = path.clone();
        let found = tokio::task::spawn_blocking(move || read(&task_path)).await.ok()?;
        match found {
            Ok(found) if Some(&found) != refused.as_ref() => {
                info!(path = %path.display(), "the token was refused: using the new one of its file");
                *self.header.write().unwrap_or_else(PoisonError::into_inner) = Some(found.clone());
                Some(found)
            }
            Ok(_) => None,
            Err(err) => {
                debug!(error = %err, "the token was refused, and its file has no other");
                None
            }
        }
    }
}

/// Reads a file of one line.
fn read(path: &Path) -> Result<HeaderValue, ConfigError> {
    let fail = |reason: String| ConfigError::TokenFile { path: path.display().to_string(), reason };
    let text =
        std::fs::read_to_string(path).map_err(|err| fail(format!("cannot be read ({err})")))?;
    header(text.trim()).map_err(|_| fail("has no token of visible ASCII characters".to_owned()))
}

fn header(token: &str) -> Result<HeaderValue, ConfigError> {
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(ConfigError::Token);
    }
    let mut value =
        HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| ConfigError::Token)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_refused_token_is_read_again_from_its_file() {
        let path =
            std::env::temp_dir().join(format!("switchyard-token-{:x}", rand::random::<u64>()));
        std::fs::write(&path, "first\n").unwrap();
        let source = TokenSource::file(&path).unwrap();
        let first = source.current();
        assert_eq!(first.as_ref().unwrap(), "Bearer first");
        assert!(!format!("{source:?}").contains("first"), "{source:?}");
        assert_eq!(source.read_again(first.clone()).await, None);
        std::fs::write(&path, "second\n").unwrap();
        assert_eq!(source.read_again(first.clone()).await.unwrap(), "Bearer second");
        // A request that was sent with the first one learns of the second without reading.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(source.read_again(first).await.unwrap(), "Bearer second");
        assert_eq!(source.read_again(source.current()).await, None);
        let err = TokenSource::file(&path).unwrap_err().to_string();
        assert!(err.contains("cannot be read"), "{err}");
    }

    #[tokio::test]
    async fn two_tokens_are_tried_in_turn() {
        let source = TokenSource::fixed(Some("new")).unwrap().with_fallback("old").unwrap();
        let new = source.current();
        assert_eq!(new.as_ref().unwrap(), "Bearer new");
        assert_eq!(source.read_again(new.clone()).await.unwrap(), "Bearer old");
        assert_eq!(source.current().unwrap(), "Bearer old");
        // A request that was sent with the first one goes on with the second.
        assert_eq!(source.read_again(new).await.unwrap(), "Bearer old");
        assert_eq!(source.read_again(source.current()).await.unwrap(), "Bearer new");
        let same = TokenSource::fixed(Some("new")).unwrap().with_fallback("new").unwrap();
        assert_eq!(same.read_again(same.current()).await, None);
    }
}
