//! Options for TLS, which all commands with connections share.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use control_api::Security;
use control_api::trust::tls::{ClientCertificates, Tls, TlsFiles};

/// Certificates of a process.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TlsArgs {
    /// Folder with cert.pem, key.pem and ca.pem, as `certs issue` writes it. A client needs only ca.pem there. Names as
    /// in Kubernetes work, too: tls.crt, tls.key and ca.crt. Changed files come into force within two seconds.
    #[arg(long, env = "SWITCHYARD_TLS", value_name = "DIR")]
    pub tls: Option<PathBuf>,
    /// Certificate, instead of that in the folder of --tls.
    #[arg(long, env = "SWITCHYARD_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate, instead of that in the folder of --tls.
    #[arg(long, env = "SWITCHYARD_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities to trust, instead of those in the folder of --tls.
    #[arg(long, env = "SWITCHYARD_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Allow plain text on other addresses than those of the loopback interface. Everybody on the network can then read
    /// tokens and metadata.
    #[arg(
        long,
        env = "SWITCHYARD_INSECURE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    pub insecure: bool,
}

/// Rule of a listener for certificates of clients.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct ListenerTlsArgs {
    /// Certificates of clients. optional: those with a certificate have its role. required: a client without one is
    /// refused, also a monitor that reads metrics or health.
    #[arg(
        long,
        env = "SWITCHYARD_TLS_CLIENTS",
        value_name = "optional|required",
        default_value = "optional"
    )]
    tls_clients: Clients,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum Clients {
    #[default]
    Optional,
    Required,
}

impl ListenerTlsArgs {
    fn rule(self) -> ClientCertificates {
        match self.tls_clients {
            Clients::Optional => ClientCertificates::Optional,
            Clients::Required => ClientCertificates::Required,
        }
    }
}

impl TlsArgs {
    /// Reads the files. A thread follows them from then on.
    pub fn security(&self) -> Result<Security> {
        self.open(ClientCertificates::Optional)
    }

    /// As [`security`](Self::security), for a process with listeners. An error says that they would be less protected
    /// than the options ask for.
    pub fn listener_security(&self, listener: ListenerTlsArgs) -> Result<Security> {
        let security = self.open(listener.rule())?;
        if security.for_listener().is_some() {
            return Ok(security);
        }
        // Without a certificate the port would be open in plain text, and no rule for clients would hold.
        if let Some(dir) = &self.tls {
            bail!(
                "--tls {}: a listener needs a certificate there, cert.pem and key.pem: expected a folder that `switchyard \
                 certs issue` has written",
                dir.display()
            );
        }
        if matches!(listener.rule(), ClientCertificates::Required) {
            bail!(
                "--tls-clients required needs a certificate and an authority: give --tls DIR (SWITCHYARD_TLS) with a folder \
                 that `switchyard certs issue` has written"
            );
        }
        Ok(security)
    }

    fn open(&self, clients: ClientCertificates) -> Result<Security> {
        let mut files = match &self.tls {
            Some(dir) => TlsFiles::in_folder(dir).context("--tls")?,
            None => TlsFiles::default(),
        };
        files.cert = self.tls_cert.clone().or(files.cert);
        files.key = self.tls_key.clone().or(files.key);
        files.ca = self.tls_ca.clone().or(files.ca);
        let tls = match files == TlsFiles::default() {
            true => None,
            false => Some(Tls::open(files, clients)?),
        };
        Ok(Security { tls, insecure: self.insecure })
    }
}
