//! Names of the choices that command lines have about queues.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{Doorbell, QueuePath};

/// A text that names none of the choices.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{found}` is not a {what}: expected {expected}")]
pub struct ParseQueueError {
    /// Kind of the name.
    pub what: &'static str,
    /// Name found.
    pub found: String,
    /// Valid names.
    pub expected: &'static str,
}

impl QueuePath {
    /// Name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Devx => "devx",
        }
    }
}

impl Doorbell {
    /// Name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WithRecord => "record",
            Self::RegisterAlone => "register",
        }
    }
}

impl fmt::Display for QueuePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for QueuePath {
    type Err = ParseQueueError;

    fn from_str(text: &str) -> Result<Self, ParseQueueError> {
        let found = [Self::Plain, Self::Devx].into_iter().find(|path| path.name() == text);
        found.ok_or_else(|| ParseQueueError {
            what: "kind of queue",
            found: text.to_owned(),
            expected: "plain or devx",
        })
    }
}

impl FromStr for Doorbell {
    type Err = ParseQueueError;

    fn from_str(text: &str) -> Result<Self, ParseQueueError> {
        let bells = [Self::WithRecord, Self::RegisterAlone];
        let found = bells.into_iter().find(|bell| bell.name() == text);
        found.ok_or_else(|| ParseQueueError {
            what: "doorbell",
            found: text.to_owned(),
            expected: "record or register",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_by_their_names() {
        for path in [QueuePath::Plain, QueuePath::Devx] {
            assert_eq!(path.to_string().parse(), Ok(path));
        }
        for bell in [Doorbell::WithRecord, Doorbell::RegisterAlone] {
            assert_eq!(bell.to_string().parse(), Ok(bell));
        }
        let error = "DevX".parse::<QueuePath>().unwrap_err();
        assert_eq!(error.to_string(), "`DevX` is not a kind of queue: expected plain or devx");
        let error = "".parse::<Doorbell>().unwrap_err();
        assert_eq!(error.to_string(), "`` is not a doorbell: expected record or register");
    }
}
