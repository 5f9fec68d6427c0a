//! Identities of callers and their rights. It knows no routes: each route has a [`Rule`].

pub(crate) mod audit;
mod audit_budget;
pub(crate) mod metrics;
pub(crate) mod rates;
mod ticket_audit;
pub(crate) mod tokens;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use control_api::{MemberId, WhoAmI};
use sha2::{Digest, Sha256};
use trust::ticket::MAX_HOLDER_BYTES;
use trust::tokens::{TokenHash, TokenRefusal};
use trust::{Credential, Identity, Role};

use tokens::TokenFile;

/// An identity with its rights.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// Name in the certificate or the token file, with unusual characters escaped.
    pub(crate) name: String,
    pub(crate) roles: &'static [Role],
    pub(crate) proof: Proof,
    /// Address of the caller, also if a follower has passed the request on.
    pub(crate) address: Option<IpAddr>,
    /// Token of a token file, to see whether it is still valid.
    token: Option<TokenHash>,
}

/// Proof of a caller's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// The control plane asks for none.
    None,
    /// The cluster's own token, which has all roles.
    ClusterToken,
    /// A token of the token file.
    Token,
    /// A client certificate.
    Certificate,
}

impl Proof {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::ClusterToken => "cluster_token",
            Self::Token => "token",
            Self::Certificate => "certificate",
        }
    }
}

impl Caller {
    fn new(name: &str, roles: &'static [Role], proof: Proof, address: Option<IpAddr>) -> Self {
        Self { name: visible(name, MAX_NAME_CHARS), roles, proof, address, token: None }
    }

    /// The caller of a control plane that asks for no identity.
    pub(crate) fn anonymous(address: Option<IpAddr>) -> Self {
        Self::new("anonymous", &Role::ALL, Proof::None, address)
    }

    /// The caller with an identity that was proved before.
    pub(crate) fn identified(identity: &Identity, address: Option<IpAddr>) -> Self {
        let proof = match identity.credential {
            Credential::Certificate => Proof::Certificate,
            Credential::Token => Proof::Token,
        };
        Self::new(&identity.name, rights(identity.role), proof, address)
    }

    /// Returns true if the caller has proved an identity.
    pub(crate) fn is_identified(&self) -> bool {
        self.proof != Proof::None
    }

    /// The name of an identity that the caller does not share with the whole fleet.
    pub(crate) fn own_name(&self) -> Option<&str> {
        match self.proof {
            Proof::None | Proof::ClusterToken => None,
            Proof::Token | Proof::Certificate => Some(&self.name),
        }
    }

    /// Names the caller as an observer of members: its identity at its address. Names in the requests of one caller
    /// make no others.
    pub(crate) fn observer(&self) -> String {
        let name = if self.is_identified() { &self.name } else { "" };
        format!("{name} {}", rates::site(self.address))
    }

    /// Text of the caller's host. An IPv6 address counts with its /64.
    pub(crate) fn site(&self) -> String {
        rates::site(self.address).to_string()
    }

    /// Name of the caller's budget in the audit log. Callers without an identity have one for each address.
    pub(crate) fn budget(&self) -> String {
        if self.is_identified() { self.name.clone() } else { self.observer() }
    }

    /// Tag of the members that this caller registers. Only callers with the same tag may change them. `None` for
    /// callers that share an identity with everyone.
    pub(crate) fn member_tag(&self) -> Option<String> {
        match self.proof {
            Proof::None | Proof::ClusterToken => None,
            Proof::Token | Proof::Certificate => {
                let digest = Sha256::digest(format!("switchyard member of {}", self.name));
                Some(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect())
            }
        }
    }

    /// Identity to which tickets are issued and memory is lent. Callers that share an identity with everyone count by their address, an IPv6
    /// address with its /64.
    pub(crate) fn holder(&self) -> String {
        let name = &self.name[..self.name.floor_char_boundary(MAX_HOLDER_NAME)];
        match (self.proof, self.address) {
            (Proof::None | Proof::ClusterToken, Some(_)) => {
                format!("{name} at {}", rates::site(self.address))
            }
            _ => name.to_owned(),
        }
    }

    /// Returns true if the caller has registered the member, or the member has no owner.
    pub(crate) fn owns(&self, member: &MemberId) -> bool {
        match (self.member_tag(), member.tag()) {
            (Some(tag), Some(owner)) => tag == owner,
            _ => true,
        }
    }

    /// Returns true if the caller is a server that may change the member.
    pub(crate) fn acts_for(&self, member: &MemberId) -> bool {
        self.roles.contains(&Role::Server) && self.owns(member)
    }

    pub(crate) fn role_names(&self) -> Vec<String> {
        self.roles.iter().map(|role| role.name().to_owned()).collect()
    }

    pub(crate) fn whoami(&self) -> WhoAmI {
        WhoAmI {
            name: self.name.clone(),
            roles: self.role_names(),
            credential: self.proof.name().to_owned(),
        }
    }
}

/// Roles that an identity of `role` has.
fn rights(role: Role) -> &'static [Role] {
    match role {
        Role::Server => &[Role::Server],
        Role::Client => &[Role::Client],
        Role::Operator => &[Role::Operator, Role::Viewer],
        Role::Viewer => &[Role::Viewer],
    }
}

/// Callers that may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Everyone, without an identity.
    Open,
    /// Callers with one of these roles.
    Roles(&'static [Role]),
    /// Callers with a role of `any`, and callers with the role server that have registered the member in question.
    Owner { any: &'static [Role] },
}

impl Rule {
    /// Roles that may use the route, for documents.
    pub(crate) fn roles(self) -> Vec<Role> {
        match self {
            Self::Open => Vec::new(),
            Self::Roles(roles) => roles.to_vec(),
            Self::Owner { any } => [&[Role::Server], any].concat(),
        }
    }

    /// Checks the caller. `what` names the request for the message, and `member` is the member that it is about.
    pub(crate) fn check(
        self,
        caller: &Caller,
        what: &str,
        member: Option<&MemberId>,
    ) -> Result<(), Forbidden> {
        let has = |roles: &[Role]| roles.iter().any(|role| caller.roles.contains(role));
        let is_allowed = match self {
            Self::Open => true,
            Self::Roles(roles) => has(roles),
            Self::Owner { any } => {
                let is_server = has(&[Role::Server]);
                if is_server && !has(any) && member.is_some_and(|member| !caller.owns(member)) {
                    let (what, name) = (what.to_owned(), caller.name.clone());
                    return Err(Forbidden::Member { what, name });
                }
                is_server || has(any)
            }
        };
        if is_allowed {
            return Ok(());
        }
        Err(Forbidden::Role {
            what: what.to_owned(),
            needed: Names(&self.roles(), " or ").to_string(),
            name: caller.name.clone(),
            proof: caller.proof.name(),
            found: Names(caller.roles, " and ").to_string(),
        })
    }
}

struct Names<'a>(&'a [Role], &'static str);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|role| role.name()).collect();
        f.write_str(&names.join(self.1))
    }
}

/// Refusal of a caller that is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Forbidden {
    #[error("{what} needs the role {needed}, but {name} ({proof}) has the role {found}")]
    Role { what: String, needed: String, name: String, proof: &'static str, found: String },
    #[error(
        "{what}: the member belongs to another server than {name}; a server changes its own member only"
    )]
    Member { what: String, name: String },
}

/// Refusal of a caller that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unauthorized {
    #[error("no token: send the header `Authorization: Bearer TOKEN`")]
    MissingToken,
    #[error("no client certificate: show one of the fleet's authority")]
    MissingCertificate,
    #[error(
        "no token and no client certificate: send the header `Authorization: Bearer TOKEN`, or show a certificate of the fleet's authority"
    )]
    Missing,
    #[error("not a bearer token: send the header `Authorization: Bearer TOKEN`")]
    Scheme,
    #[error(transparent)]
    Token(#[from] TokenRefusal),
}

/// The identities that a control plane accepts.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    cluster_tokens: Vec<TokenHash>,
    pub(crate) tokens: Option<Arc<TokenFile>>,
    accepts_certificates: bool,
}

impl Access {
    /// Each of `cluster_tokens` has all roles. `accepts_certificates` says that the listener verifies client
    /// certificates.
    pub(crate) fn new<'a>(
        cluster_tokens: impl IntoIterator<Item = &'a str>,
        tokens: Option<Arc<TokenFile>>,
        accepts_certificates: bool,
    ) -> Self {
        let cluster_tokens =
            cluster_tokens.into_iter().map(|token| TokenHash::of(token.as_bytes())).collect();
        Self { cluster_tokens, tokens, accepts_certificates }
    }

    /// Returns false if every process that reaches the port has all roles.
    pub(crate) fn requires_identity(&self) -> bool {
        self.checks_tokens() || self.accepts_certificates
    }

    fn checks_tokens(&self) -> bool {
        !self.cluster_tokens.is_empty() || self.tokens.is_some()
    }

    /// The caller behind the value of the header `Authorization`, or else behind a verified certificate. A token comes
    /// first because the caller chooses to send it, while a certificate may belong to the whole host.
    pub(crate) fn identify(
        &self,
        certificate: Option<&Identity>,
        authorization: Option<&[u8]>,
        address: Option<IpAddr>,
    ) -> Result<Caller, Unauthorized> {
        match (authorization, certificate) {
            (Some(value), _) if self.checks_tokens() => self.identify_token(value, address),
            (_, Some(identity)) => Ok(Caller::identified(identity, address)),
            _ if !self.requires_identity() => Ok(Caller::anonymous(address)),
            (Some(value), None) => self.identify_token(value, address),
            (None, None) => Err(match (self.checks_tokens(), self.accepts_certificates) {
                (true, true) => Unauthorized::Missing,
                (true, false) => Unauthorized::MissingToken,
                (false, _) => Unauthorized::MissingCertificate,
            }),
        }
    }

    fn identify_token(
        &self,
        authorization: &[u8],
        address: Option<IpAddr>,
    ) -> Result<Caller, Unauthorized> {
        let (scheme, token) = authorization.split_at(authorization.len().min(BEARER.len()));
        if !scheme.eq_ignore_ascii_case(BEARER) {
            return Err(Unauthorized::Scheme);
        }
        if self.is_cluster_token(token) {
            return Ok(Caller::new(CLUSTER_TOKEN, &Role::ALL, Proof::ClusterToken, address));
        }
        let tokens = self.tokens.as_ref().ok_or(TokenRefusal::Unknown)?;
        let identity = tokens.table().identify(token, SystemTime::now())?;
        let token = Some(TokenHash::of(token));
        Ok(Caller { token, ..Caller::identified(&identity, address) })
    }

    /// Compares hashes, so that the time tells nothing about the token.
    pub(crate) fn is_cluster_token(&self, token: &[u8]) -> bool {
        let hash = TokenHash::of(token);
        self.cluster_tokens.contains(&hash)
    }

    /// Returns false once the caller's token has expired or left the token file.
    pub(crate) fn is_valid(&self, caller: &Caller) -> bool {
        match (&caller.token, &self.tokens) {
            (Some(token), Some(tokens)) => tokens.table().has(token, SystemTime::now()),
            _ => true,
        }
    }
}

/// `text` with unusual characters escaped, cut after `max_chars` characters.
pub(crate) fn visible(text: &str, max_chars: usize) -> String {
    let mut shown = String::new();
    for (char_idx, char) in text.chars().enumerate() {
        if char_idx == max_chars {
            shown.push('…');
            break;
        }
        match char {
            ' '..='~' => shown.push(char),
            // Letters of any script; no control characters, and none that change the direction of text.
            _ if char.is_alphanumeric() => shown.push(char),
            _ => shown.extend(char.escape_default()),
        }
    }
    shown
}

const BEARER: &[u8] = b"Bearer ";
const CLUSTER_TOKEN: &str = "cluster-token";
const MAX_NAME_CHARS: usize = 128;
/// Bytes of a name in a holder, with room for an address.
const MAX_HOLDER_NAME: usize = MAX_HOLDER_BYTES - 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_token_is_let_in() {
        let access = Access::new(Some("secret"), None, false);
        let attempt = |value: Option<&str>| access.identify(None, value.map(str::as_bytes), None);
        for right in ["Bearer secret", "bearer secret"] {
            assert_eq!(attempt(Some(right)).unwrap().roles, Role::ALL);
        }
        for wrong in
            ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "secret", "Basic secret"]
        {
            assert!(attempt(Some(wrong)).is_err(), "{wrong}");
        }
        assert_eq!(attempt(None).unwrap_err(), Unauthorized::MissingToken);
        // With certificates a caller without one needs a token; without either, all are let in. A refusal asks for what
        // the port accepts.
        let both = Access::new(Some("secret"), None, true);
        assert_eq!(both.identify(None, None, None).unwrap_err(), Unauthorized::Missing);
        let certificates = Access::new(None, None, true);
        let refusal = certificates.identify(None, None, None).unwrap_err();
        assert_eq!(refusal, Unauthorized::MissingCertificate);
        assert!(!refusal.to_string().contains("token"), "{refusal}");
        assert!(Access::new(None, None, false).identify(None, None, None).is_ok());
    }

    #[test]
    fn a_token_comes_before_a_certificate() {
        let certificate = Identity {
            name: "host-1".to_owned(),
            role: Role::Server,
            credential: Credential::Certificate,
        };
        let proof = |access: &Access, value: Option<&[u8]>| {
            access.identify(Some(&certificate), value, None).map(|caller| caller.proof)
        };
        let access = Access::new(Some("secret"), None, true);
        assert_eq!(proof(&access, None), Ok(Proof::Certificate));
        assert_eq!(proof(&access, Some(b"Bearer secret")), Ok(Proof::ClusterToken));
        assert!(proof(&access, Some(b"Bearer wrong")).is_err());
        // Without tokens of its own the control plane cannot judge one.
        let access = Access::new(None, None, true);
        assert_eq!(proof(&access, Some(b"Bearer secret")), Ok(Proof::Certificate));
        assert!(access.identify(None, Some(b"Bearer secret"), None).is_err());
    }

    #[test]
    fn a_server_changes_its_own_member_only() {
        let caller = |name: &str, role| {
            let credential = Credential::Certificate;
            Caller::identified(&Identity { name: name.to_owned(), role, credential }, None)
        };
        let (mine, other) = (caller("gpu-1", Role::Server), caller("gpu-2", Role::Server));
        let member = MemberId::random_with_tag(&mine.member_tag().unwrap()).unwrap();
        let rule = Rule::Owner { any: &[Role::Operator] };
        assert_eq!(rule.check(&mine, "drain", Some(&member)), Ok(()));
        assert_eq!(rule.check(&caller("ops", Role::Operator), "drain", Some(&member)), Ok(()));
        let cluster = Access::new(Some("x"), None, false);
        let cluster = cluster.identify(None, Some(b"Bearer x"), None).unwrap();
        assert_eq!(rule.check(&cluster, "drain", Some(&member)), Ok(()));
        assert!(matches!(
            rule.check(&other, "drain", Some(&member)),
            Err(Forbidden::Member { .. })
        ));
        // A member that was registered with the cluster's token has no owner.
        assert_eq!(rule.check(&other, "drain", Some(&MemberId::random())), Ok(()));
        let text = rule.check(&caller("web", Role::Viewer), "drain", None).unwrap_err().to_string();
        assert_eq!(
            text,
            "drain needs the role server or operator, but web (certificate) has the role viewer"
        );
    }

    /// A host has 2^64 IPv6 addresses, and is one holder of tickets all the same.
    #[test]
    fn the_addresses_of_a_host_are_one_holder() {
        for (access, proof) in [
            (Access::new(None, None, false), None),
            (Access::new(Some("x"), None, false), Some("Bearer x")),
        ] {
            let holder = |address: &str| {
                let address = Some(address.parse().unwrap());
                let caller = access.identify(None, proof.map(str::as_bytes), None).unwrap();
                Caller { address, ..caller }.holder()
            };
            let (low, high): (u64, u64) = rand::random();
            let host = |rest: u64| {
                std::net::Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | u128::from(rest))
            };
            assert_eq!(
                holder(&host(low).to_string()),
                holder(&host(high).to_string()),
                "{low} {high}"
            );
            assert_ne!(holder("2001:db8::1"), holder("2001:db8:0:1::1"));
            assert_ne!(holder("10.0.0.1"), holder("10.0.0.2"));
        }
    }

    #[test]
    fn text_of_strangers_is_shown_without_control_characters() {
        let shown = visible("a\u{1b}[2Jé\u{202e}\n", 10);
        assert_eq!(shown, "a\\u{1b}[2Jé\\u{202e}\\n");
        assert_eq!(visible("abcdef", 3), "abc…");
    }
}
