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
}

impl TokenSource {
    /// A token that stays the same.
    pub(crate) fn fixed(token: Option<&str>) -> Result<Self, ConfigError> {
        let header = token.map(header).transpose()?;
        Ok(Self { header: RwLock::new(header), path: None })
    }

    /// The token in a file.
    pub(crate) fn file(path: &Path) -> Result<Self, ConfigError> {
        let header = read(path)?;
        Ok(Self { header: RwLock::new(Some(header)), path: Some(path.to_owned()) })
    }

    pub(crate) fn current(&self) -> Option<HeaderValue> {
        self.header.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The token that is in the file by now, if it differs from `refused`.
    pub(crate) async fn read_again(&self, refused: Option<HeaderValue>) -> Option<HeaderValue> {
        // Another request may have read it already.
        let current = self.current();
        if current != refused {
            return current;
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
}
