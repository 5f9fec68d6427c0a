//! The check of a source without tickets whose readers must have a certificate.

use httpd::trust::{Credential, Identity, Role};
use p2p_core::bootstrap::{HandshakeBinding, Reject, RejectCode, ShownTicket, TicketCheck};

/// Admits peers whose certificate has the role server. Clients and viewers have certificates of the same authority.
#[derive(Debug)]
pub(crate) struct ServersOnly;

impl TicketCheck for ServersOnly {
    fn check(
        &self,
        _: Option<&ShownTicket>,
        binding: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject> {
        let found = match binding.peer {
            Some(Identity { role: Role::Server, credential: Credential::Certificate, .. }) => {
                return Ok(None);
            }
            Some(Identity { name, role, .. }) => format!("that of {name} has the role {role}"),
            None => "the peer's certificate names no role".to_owned(),
        };
        let text = format!("this port admits certificates of the role server only, and {found}");
        Err(Reject::new(RejectCode::TICKET, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certificates_of_servers_are_admitted() {
        let check = |peer: Option<&Identity>| {
            ServersOnly.check(None, &HandshakeBinding { channel: None, hello: b"", peer })
        };
        for role in Role::ALL {
            let credential = Credential::Certificate;
            let holder = Identity { name: "holder".to_owned(), role, credential };
            match (check(Some(&holder)), role) {
                (outcome, Role::Server) => assert_eq!(outcome, Ok(None)),
                (outcome, _) => {
                    let text = outcome.expect_err("another role").message;
                    assert!(text.contains("holder has the role") && text.contains(role.name()));
                }
            }
        }
        assert!(check(None).is_err());
        let credential = Credential::Token;
        let token = Identity { name: "holder".to_owned(), role: Role::Server, credential };
        assert!(check(Some(&token)).is_err());
    }
}
