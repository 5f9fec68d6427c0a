//! The identity of a peer, and the role that it has.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Set of rights of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Registers an expert server and renews its lease.
    Server,
    /// Reads the placement, gets tickets and reports servers that it cannot reach.
    Client,
    /// Changes the fleet: drains members, sets goals. Has the rights of a viewer, too.
    Operator,
    /// Reads everything and changes nothing.
    Viewer,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 4] = [Self::Server, Self::Client, Self::Operator, Self::Viewer];

    /// The name in certificates, token files and JSON: lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
            Self::Operator => "operator",
            Self::Viewer => "viewer",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        let role = Self::ALL.into_iter().find(|role| role.name() == text);
        role.ok_or_else(|| UnknownRole { found: text.escape_default().to_string() })
    }
}

/// A text that names no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown role \"{found}\": expected server, client, operator or viewer")]
pub struct UnknownRole {
    found: String,
}

/// A peer that has proved its name and role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Name in the certificate or in the token file.
    pub name: String,
    /// Its rights.
    pub role: Role,
    /// The proof.
    pub credential: Credential,
}

/// Kind of a peer's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Credential {
    /// A client certificate of the fleet's certificate authority.
    Certificate,
    /// A bearer token.
    Token,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_is_read_back_from_its_name() {
        for role in Role::ALL {
            assert_eq!(role.to_string().parse(), Ok(role));
            assert_eq!(serde_plain(role), role.name());
        }
        let err = "root\u{1b}[2J".parse::<Role>().unwrap_err().to_string();
        assert!(err.contains("expected server, client, operator or viewer"), "{err}");
        assert!(!err.contains('\u{1b}'), "{err}");
    }

    /// The name that serde writes.
    fn serde_plain(role: Role) -> String {
        let json = serde_json::to_string(&role).expect("a role is a string");
        json.trim_matches('"').to_owned()
    }
}
