//! The token file of a running control plane. It is read again every second.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use tracing::{error, info};
use trust::tokens::{self, TokenFileError, TokenTable};

use super::audit::AuditLog;
use super::metrics::AccessMetrics;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct TokenFile {
    path: PathBuf,
    table: RwLock<Arc<TokenTable>>,
    /// Reason why the file could not be used the last time.
    error: Mutex<Option<String>>,
}

impl TokenFile {
    /// Reads the file.
    pub(crate) fn open(path: &Path) -> Result<Self, TokenFileError> {
        let table = RwLock::new(Arc::new(tokens::read(path)?));
        Ok(Self { path: path.to_owned(), table, error: Mutex::default() })
    }

    /// The tokens of the last file that was right.
    pub(crate) fn table(&self) -> Arc<TokenTable> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reason why the file cannot be used, while older tokens stay in force.
    pub(crate) fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file every second, until the caller drops the future. A wrong file changes nothing.
    pub(crate) async fn follow(self: Arc<Self>, metrics: AccessMetrics, audit: AuditLog) {
        loop {
            tokio::time::sleep(PERIOD).await;
            let path = self.path.clone();
            let found = tokio::task::spawn_blocking(move || tokens::read(&path)).await;
            // An error means that the runtime shuts down.
            let Ok(found) = found else { return };
            self.apply(found, &metrics, &audit);
        }
    }

    fn apply(
        &self,
        found: Result<TokenTable, TokenFileError>,
        metrics: &AccessMetrics,
        audit: &AuditLog,
    ) {
        let reason = found.as_ref().err().map(ToString::to_string);
        metrics.token_file_valid.set(i64::from(reason.is_none()));
        let is_new_reason = {
            let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *known, reason.clone()) != reason
        };
        match found {
            Ok(table) if table.entries() != self.table().entries() => {
                let (before, after) = (self.table().entries().len(), table.entries().len());
                *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
                info!(path = %self.path.display(), before, after, "the token file has changed");
                audit.note("tokens", "ok", Some(format!("{before} tokens before, {after} now")));
            }
            Ok(_) if is_new_reason => {
                info!(path = %self.path.display(), "the token file is right again");
            }
            Ok(_) => {}
            Err(err) if is_new_reason => {
                error!(error = %err, "the token file cannot be used: the tokens read before stay in force");
                audit.note("tokens", "wrong_file", reason);
            }
            Err(_) => {}
        }
    }
}

const PERIOD: Duration = Duration::from_secs(1);
