//! A client of etcd's JSON interface, the gRPC gateway that every etcd from 3.4 on serves under `/v3`. It needs no
//! protobuf compiler and no second HTTP stack.
//!
//! Every call has a deadline of its own and tries the endpoints in turn. An endpoint that has lost the quorum refuses
//! at once, because each request carries etcd's metadata `hasleader`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use control_api::text::without_credentials;
use reqwest::Url;
use reqwest::header::AUTHORIZATION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};
use trust::tls::{Security, Side, explain, is_loopback_host};

/// User name and password of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdCredentials {
    /// User name.
    pub user: String,
    /// Password.
    pub password: String,
}

impl std::fmt::Debug for EtcdCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdCredentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Error of a call to etcd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum EtcdError {
    /// The URL of an endpoint is malformed.
    #[error(
        "etcd endpoint {:?} is malformed ({reason}): expected https://HOST:PORT or http://HOST:PORT",
        without_credentials(url)
    )]
    Endpoint { url: String, reason: String },
    /// The password and the fleet's state would travel unencrypted over a network.
    #[error(
        "etcd endpoint {url} is plain HTTP to another host, and the fleet's state and etcd's password would travel \
         unencrypted: use https:// with --etcd-ca FILE (SWITCHYARD_ETCD_CA), or, on a trusted network, \
         --etcd-insecure (SWITCHYARD_ETCD_INSECURE=1)"
    )]
    Insecure { url: String },
    /// No endpoint accepts a connection.
    #[error(
        "etcd cannot be reached at {endpoints} ({reason}): check the endpoints, and that etcd runs there"
    )]
    Unreachable { endpoints: String, reason: String },
    /// Endpoints accept connections, but the cluster cannot decide anything.
    #[error(
        "etcd at {endpoints} has no quorum ({reason}): most of its members must run and reach each other"
    )]
    NoQuorum { endpoints: String, reason: String },
    /// The endpoint is another program.
    #[error(
        "{url} is not an etcd with its JSON interface ({reason}): check the endpoint, and that etcd runs with \
         --enable-grpc-gateway"
    )]
    NotEtcd { url: String, reason: String },
    /// User name or password are missing or wrong.
    #[error("etcd at {url} refuses the credentials ({reason}): check the user name and password")]
    Credentials { url: String, reason: String },
    /// etcd takes no certificate with a Common Name beside a user.
    #[error(
        "etcd at {url} refuses the certificate, because it has a Common Name: with users, etcd's JSON interface takes \
         only certificates without one"
    )]
    CommonName { url: String },
    /// The user may not access the keys.
    #[error(
        "etcd at {url} denies access ({reason}): grant the user read and write access to the prefix"
    )]
    Denied { url: String, reason: String },
    /// etcd's quota is used up.
    #[error(
        "etcd at {url} has no space left ({reason}): compact and defragment it, then disarm its alarm, and writing \
         resumes by itself"
    )]
    Full { url: String, reason: String },
    /// The lease does not exist any more.
    #[error("etcd has ended the lease of this control plane")]
    LeaseNotFound,
    /// Any other refusal.
    #[error("etcd at {url} refuses {operation}: {reason}")]
    Refused { url: String, operation: String, reason: String },
}

/// Client of one etcd cluster.
#[derive(Debug)]
pub(crate) struct EtcdClient {
    http: reqwest::Client,
    endpoints: Vec<Url>,
    /// Index of the endpoint that answered last.
    current: AtomicUsize,
    credentials: Option<EtcdCredentials>,
    token: Mutex<Option<String>>,
}

impl EtcdClient {
    pub(crate) fn new(
        endpoints: &[String],
        credentials: Option<EtcdCredentials>,
        security: &Security,
    ) -> Result<Self, EtcdError> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(Duration::from_secs(30))
            .tcp_nodelay(true)
            .tls_backend_preconfigured(security.client_config())
            .build();
        let setup = |reason: String| EtcdError::Endpoint { url: endpoints.join(","), reason };
        let http = http.map_err(|err| setup(err.to_string()))?;
        if endpoints.is_empty() {
            return Err(setup("no endpoint".to_owned()));
        }
        let endpoints =
            endpoints.iter().map(|url| parse(url, security)).collect::<Result<_, _>>()?;
        let (current, token) = (AtomicUsize::new(0), Mutex::new(None));
        Ok(Self { http, endpoints, current, credentials, token })
    }

    /// Names endpoints on other hosts that are reached in plain text.
    pub(crate) fn exposure(&self) -> Option<String> {
        let url = self.endpoints.iter().find(|url| is_exposed(url))?;
        Some(format!(
            "INSECURE: etcd at {url} is reached in plain text (--etcd-insecure): give https endpoints and --etcd-ca"
        ))
    }

    /// The endpoints, for messages.
    pub(crate) fn endpoints(&self) -> String {
        let texts: Vec<&str> =
            self.endpoints.iter().map(|url| url.as_str().trim_end_matches('/')).collect();
        texts.join(", ")
    }

    /// Calls `path` until `bound` has passed, at one endpoint after the other. After a timeout etcd may still
    /// carry the call out.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        bound: Duration,
    ) -> Result<T, EtcdError> {
        let deadline = Instant::now() + bound;
        let mut last = self.round(path, body, bound, deadline).await?;
        // Most losses of a quorum are elections of etcd, which take a second.
        while matches!(last, Outcome::Failed(Failure::NoQuorum(_)))
            && Instant::now() + ROUND_PAUSE < deadline
        {
            tokio::time::sleep(ROUND_PAUSE).await;
            last = self.round(path, body, bound, deadline).await?;
        }
        let last = match last {
            Outcome::Answer(answer) => return Ok(answer),
            Outcome::Failed(failure) => failure,
        };
        let endpoints = self.endpoints();
        Err(match last {
            Failure::NoQuorum(reason) => EtcdError::NoQuorum { endpoints, reason },
            Failure::Silent(reason) => EtcdError::Unreachable { endpoints, reason },
            _ => EtcdError::Unreachable { endpoints, reason: "no answer".to_owned() },
        })
    }

    /// Calls `path` at one endpoint after the other.
    async fn round<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        bound: Duration,
        deadline: Instant,
    ) -> Result<Outcome<T>, EtcdError> {
        // A paused endpoint accepts connections and never answers: leave time for the others.
        let share = bound / self.endpoints.len() as u32;
        let first = self.current.load(Ordering::Relaxed);
        let mut last = None;
        for i in 0..self.endpoints.len() {
            let index = (first + i) % self.endpoints.len();
            let until = deadline.min(Instant::now() + share);
            let outcome = match self.at(index, path, body, until).await {
                Err(Failure::Token) => {
                    self.token.lock().unwrap_or_else(PoisonError::into_inner).take();
                    self.at(index, path, body, until).await
                }
                outcome => outcome,
            };
            match outcome {
                Ok(answer) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok(Outcome::Answer(answer));
                }
                Err(Failure::Final(err)) => return Err(err),
                // An endpoint that answers says more than one that does not.
                Err(failure @ Failure::NoQuorum(_)) => last = Some(failure),
                Err(failure) => drop(last.get_or_insert(failure)),
            }
        }
        Ok(Outcome::Failed(last.unwrap_or(Failure::Silent("no endpoint".to_owned()))))
    }

    /// Calls `path` at one endpoint only, because the call waits for an event. `None` after `bound`. After a failure
    /// the next call begins with the next endpoint.
    pub(crate) async fn call_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        bound: Duration,
    ) -> Result<Option<T>, EtcdError> {
        let index = self.current.load(Ordering::Relaxed);
        let until = Instant::now() + bound;
        let endpoints = self.endpoints[index].to_string();
        let next = (index + 1) % self.endpoints.len();
        let err = match self.at(index, path, body, until).await {
            Ok(answer) => return Ok(Some(answer)),
            Err(Failure::Final(err)) => return Err(err),
            Err(_) if Instant::now() >= until => return Ok(None),
            Err(Failure::Token) => {
                self.token.lock().unwrap_or_else(PoisonError::into_inner).take();
                return Ok(None);
            }
            Err(Failure::NoQuorum(reason)) => EtcdError::NoQuorum { endpoints, reason },
            Err(Failure::Silent(reason)) => EtcdError::Unreachable { endpoints, reason },
        };
        self.current.store(next, Ordering::Relaxed);
        Err(err)
    }

    /// Opens the stream of `path` at the endpoint that answered last.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &Value,
        bound: Duration,
    ) -> Result<reqwest::Response, EtcdError> {
        let url = &self.endpoints[self.current.load(Ordering::Relaxed)];
        let until = Instant::now() + bound;
        let unreachable =
            |reason: String| EtcdError::Unreachable { endpoints: url.to_string(), reason };
        let token = self.token(url, until).await.map_err(|_| unreachable("no token".to_owned()))?;
        let send = self.request(url, path, body, token).send();
        let response =
            timeout_at(until, send).await.map_err(|_| unreachable("no answer".to_owned()))?;
        response.map_err(|err| unreachable(causes(&err)))
    }

    async fn at<T: DeserializeOwned>(
        &self,
        index: usize,
        path: &str,
        body: &Value,
        until: Instant,
    ) -> Result<T, Failure> {
        let url = &self.endpoints[index];
        let token = self.token(url, until).await?;
        self.exchange(url, path, body, token, until).await
    }

    /// The token of the credentials; `None` without credentials.
    async fn token(&self, url: &Url, until: Instant) -> Result<Option<String>, Failure> {
        let Some(credentials) = &self.credentials else { return Ok(None) };
        let known = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if known.is_some() {
            return Ok(known);
        }
        let body = json!({ "name": credentials.user, "password": credentials.password });
        let answer: Token = self.exchange(url, "auth/authenticate", &body, None, until).await?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer.token.clone());
        Ok(Some(answer.token))
    }

    fn request(
        &self,
        url: &Url,
        path: &str,
        body: &Value,
        token: Option<String>,
    ) -> reqwest::RequestBuilder {
        let url = format!("{}/v3/{path}", url.as_str().trim_end_matches('/'));
        let request = self.http.post(url).json(body).header("Grpc-Metadata-hasleader", "true");
        match token {
            Some(token) => request.header(AUTHORIZATION, token),
            None => request,
        }
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        url: &Url,
        path: &str,
        body: &Value,
        token: Option<String>,
        until: Instant,
    ) -> Result<T, Failure> {
        let exchange = async {
            let response = self.request(url, path, body, token).send().await?;
            let status = response.status();
            Ok::<_, reqwest::Error>((status, response.bytes().await?))
        };
        // A member without a quorum accepts connections and leaves requests waiting.
        let stuck = || Failure::NoQuorum(format!("{url} does not answer in time"));
        let outcome = timeout_at(until, exchange).await.map_err(|_| stuck())?;
        let (status, bytes) = outcome.map_err(|err| Failure::Silent(causes(&err)))?;
        let not_etcd =
            |reason: String| Failure::Final(EtcdError::NotEtcd { url: url.to_string(), reason });
        if status.is_success() {
            return serde_json::from_slice(&bytes).map_err(|err| not_etcd(err.to_string()));
        }
        match serde_json::from_slice::<Refusal>(&bytes) {
            Ok(refusal) => Err(refusal.classify(url, path)),
            // A line of text in place of JSON.
            Err(_) if String::from_utf8_lossy(&bytes).contains("CommonName") => {
                Err(Failure::Final(EtcdError::CommonName { url: url.to_string() }))
            }
            Err(_) => Err(not_etcd(format!("status {status} for /v3/{path}"))),
        }
    }
}

/// Outcome of one round of attempts.
enum Outcome<T> {
    Answer(T),
    Failed(Failure),
}

/// Failure of one attempt at one endpoint.
enum Failure {
    /// No connection or no answer.
    Silent(String),
    NoQuorum(String),
    /// The token is not valid any more.
    Token,
    Final(EtcdError),
}

#[derive(Deserialize)]
struct Token {
    token: String,
}

/// Body of an error response.
#[derive(Deserialize)]
struct Refusal {
    error: String,
    #[serde(default)]
    code: u32,
}

impl Refusal {
    /// The gateway loses some codes of gRPC, so the texts decide, too.
    fn classify(self, url: &Url, path: &str) -> Failure {
        let (url, reason) = (url.to_string(), self.error);
        let has = |text: &str| reason.contains(text);
        if has("invalid auth token") || has("revision of auth store is old") {
            return Failure::Token;
        }
        if has("no leader") && !has("election:")
            || has("request timed out")
            || has("leader changed")
            || has("server stopped")
            || matches!(self.code, GRPC_UNAVAILABLE | GRPC_DEADLINE)
        {
            return Failure::NoQuorum(reason);
        }
        Failure::Final(if has("user name is empty") || has("authentication failed") {
            EtcdError::Credentials { url, reason }
        } else if has("permission denied") {
            EtcdError::Denied { url, reason }
        } else if has("authentication is not enabled") {
            let reason = format!("{reason}, but a user name is set");
            EtcdError::Credentials { url, reason }
        } else if has("database space exceeded") {
            EtcdError::Full { url, reason }
        } else if has("requested lease not found") {
            EtcdError::LeaseNotFound
        } else {
            EtcdError::Refused { url, operation: path.to_owned(), reason }
        })
    }
}

fn parse(text: &str, security: &Security) -> Result<Url, EtcdError> {
    let fail =
        |reason: &str| EtcdError::Endpoint { url: text.to_owned(), reason: reason.to_owned() };
    let url = Url::parse(text).map_err(|err| fail(&err.to_string()))?;
    match url.scheme() {
        "http" => {}
        "https" if security.for_client().is_some() => {}
        "https" => return Err(fail("https needs --etcd-ca FILE with the authority of etcd")),
        scheme => return Err(fail(&format!("scheme {scheme:?}"))),
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(fail("no host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(fail("user name or password inside: pass them by their own settings"));
    }
    if is_exposed(&url) && !security.insecure {
        return Err(EtcdError::Insecure { url: url.to_string() });
    }
    Ok(url)
}

/// Returns true for plain HTTP to another host.
fn is_exposed(url: &Url) -> bool {
    url.scheme() == "http" && !url.host_str().is_some_and(is_loopback_host)
}

/// The innermost cause: the outer ones only repeat the URL.
fn causes(err: &reqwest::Error) -> String {
    if let Some(reason) = explain(Side::Client, err) {
        return reason;
    }
    let mut cause: &dyn std::error::Error = err;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// A key or value as JSON.
pub(crate) fn encoded(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

/// Reads a number that JSON of protobuf writes as a string.
pub(crate) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Text(String),
        Value(i64),
    }
    match Number::deserialize(deserializer)? {
        Number::Text(text) => text.parse().map_err(serde::de::Error::custom),
        Number::Value(value) => Ok(value),
    }
}

/// Reads bytes in base64.
pub(crate) fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}

const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
const ROUND_PAUSE: Duration = Duration::from_millis(100);
const GRPC_DEADLINE: u32 = 4;
const GRPC_UNAVAILABLE: u32 = 14;
