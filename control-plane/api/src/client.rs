//! The HTTP client: one call per request, with a timeout and a typed error.

mod models;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Method, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::debug;

pub use models::PlacementQuery;

use trust::tls::{Security, Side, explain, is_loopback_host};

use crate::access::{AuditList, WhoAmI};
use crate::discovery::{ControlPlanes, Snapshot, Target, text_of};
use crate::error::{ApiError, CREDENTIALS_INSIDE, ConfigError, ControlError, causes};
use crate::placement::PlacementTable;
use crate::sse::SseParser;
use crate::status::ClusterStatus;
use crate::text::escaped;
use crate::tickets::{RevokeResponse, TicketRequest, TicketResponse};
use crate::token::TokenSource;
use crate::types::{
    DrainRequest, FleetGoals, LeaderInfo, LeaseRequest, LeaseResponse, MemberId, MemberInfo,
    MemberList, ModelDigests, ReadyRequest, RegisterRequest, RegisterResponse, ScalingAdvice,
    SuspectRequest, SuspectResponse,
};

/// Limits of a [`ControlClient`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Timeout of a request, including connecting and attempts at other control planes. Default: 3 s.
    pub timeout: Duration,
    /// Timeout of a silent watch stream. Default: 5 s. The server sends a keep-alive about once a second.
    pub watch_idle_timeout: Duration,
    /// Largest response and largest watch event in bytes. Default: 64 MiB.
    pub max_response_bytes: usize,
    /// TLS files of this process. Default: how the process is set up, none.
    pub security: Security,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            timeout: DEFAULT_TIMEOUT,
            watch_idle_timeout: DEFAULT_WATCH_IDLE_TIMEOUT,
            max_response_bytes: DEFAULT_MAX_RESPONSE_BYTES,
            security: Security::default(),
        }
    }
}

/// Client of the control planes of one fleet. Cheap to clone; clones share connections.
///
/// With several control planes a request goes to the one that answered last. If that one cannot be reached, does not
/// answer, or knows no leader, the request goes to the next one, each at most once. Every request may therefore be
/// carried out twice, which changes nothing.
///
/// The names in `dns://` and `k8s://` are looked up on a thread of the client's own. It looks them up again when no
/// known control plane answers, and follows changes. The methods need a tokio runtime with time and I/O enabled.
#[derive(Clone)]
pub struct ControlClient {
    http: reqwest::Client,
    planes: Arc<ControlPlanes>,
    token: Arc<TokenSource>,
    options: ClientOptions,
}

impl ControlClient {
    /// A client of the control planes at `base_urls`, one or several with commas between them, with default limits and
    /// without TLS. Each is a URL (`http://HOST:PORT`), `dns://HOST:PORT` for all addresses of a name, or, with the
    /// feature `kubernetes`, `k8s://NAMESPACE/SERVICE[:PORT]` for the ready endpoints of a Service. The port is a name
    /// or a number of the Service's pods. Sends nothing yet.
    ///
    /// # Errors
    /// [`ConfigError`] when a URL or the token is malformed, or the HTTP client cannot be set up.
    pub fn new(base_urls: &str, token: Option<String>) -> Result<Self, ConfigError> {
        Self::with_options(base_urls, token, ClientOptions::default())
    }

    /// As [`new`](Self::new), with given limits.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_options(
        base_urls: &str,
        token: Option<String>,
        options: ClientOptions,
    ) -> Result<Self, ConfigError> {
        let scheme = if options.security.for_client().is_some() { "https" } else { "http" };
        let planes = Arc::new(ControlPlanes::parse(base_urls, scheme, parse_base_url)?);
        check_security(&planes, token.is_some(), &options.security)?;
        let token = Arc::new(TokenSource::fixed(token.as_deref())?);
        Ok(Self { http: build_http(&options, &planes)?, planes, token, options })
    }

    /// The same client with the token of a file: one line. When the control plane refuses the token, the client reads
    /// the file again and repeats the request with the new token. So a token can be replaced while the process runs.
    ///
    /// # Errors
    /// [`ConfigError::TokenFile`] when the file cannot be read or has no token. [`ConfigError::Insecure`] when the token
    /// would travel over plain HTTP to another host.
    pub fn with_token_file(mut self, path: &Path) -> Result<Self, ConfigError> {
        check_security(&self.planes, true, &self.options.security)?;
        self.token = Arc::new(TokenSource::file(path)?);
        Ok(self)
    }

    /// The same client with another token for control planes that refuse the first one. The client keeps to the token
    /// that was accepted last.
    ///
    /// # Errors
    /// [`ConfigError::Token`] when the token is malformed. [`ConfigError::Insecure`] when it would travel over plain
    /// HTTP to another host.
    pub fn with_fallback_token(mut self, token: &str) -> Result<Self, ConfigError> {
        check_security(&self.planes, true, &self.options.security)?;
        self.token = Arc::new(self.token.with_fallback(token)?);
        Ok(self)
    }

    /// A client of the same control planes that shares no connections with this one. Use it on another
    /// runtime.
    ///
    /// # Errors
    /// [`ConfigError::Setup`] when the HTTP client cannot be set up.
    pub fn isolated(&self) -> Result<Self, ConfigError> {
        Ok(Self { http: build_http(&self.options, &self.planes)?, ..self.clone() })
    }

    /// A client of control planes that a test looks up.
    #[cfg(test)]
    pub(crate) fn of_planes(
        planes: ControlPlanes,
        options: ClientOptions,
    ) -> Result<Self, ConfigError> {
        let planes = Arc::new(planes);
        let token = Arc::new(TokenSource::fixed(None)?);
        Ok(Self { http: build_http(&options, &planes)?, planes, token, options })
    }

    /// The control planes that it asks.
    #[cfg(test)]
    pub(crate) fn planes(&self) -> &ControlPlanes {
        &self.planes
    }

    /// The same client with another timeout for requests.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let mut client = self.clone();
        client.options.timeout = timeout;
        client
    }

    /// The URL of the control plane that answered last. Before the first lookup, the names to look up.
    pub fn base_url(&self) -> String {
        self.planes.current()
    }

    /// Returns true if every control plane was given by its URL, so that nothing is looked up.
    pub fn has_fixed_urls(&self) -> bool {
        self.planes.is_fixed()
    }

    /// The limits.
    pub fn options(&self) -> &ClientOptions {
        &self.options
    }

    /// Registers a member. The same name and incarnation return the same member again.
    pub async fn register(
        &self,
        request: &RegisterRequest,
    ) -> Result<RegisterResponse, ControlError> {
        self.call(Method::POST, "v1/members", Some(request)).await
    }

    /// Renews a lease.
    pub async fn renew(
        &self,
        member: &MemberId,
        request: &LeaseRequest,
    ) -> Result<LeaseResponse, ControlError> {
        self.call(Method::PUT, &format!("v1/members/{member}/lease"), Some(request)).await
    }

    /// Reports the loaded experts and adds the member to the placement.
    pub async fn ready(
        &self,
        member: &MemberId,
        request: &ReadyRequest,
    ) -> Result<MemberInfo, ControlError> {
        self.call(Method::POST, &format!("v1/members/{member}/ready"), Some(request)).await
    }

    /// Removes a member from the placement. Its lease continues.
    pub async fn drain(
        &self,
        member: &MemberId,
        request: &DrainRequest,
    ) -> Result<MemberInfo, ControlError> {
        self.call(Method::POST, &format!("v1/members/{member}/drain"), Some(request)).await
    }

    /// Takes a drain back: the member returns to the placement. Changes nothing about a member that does not drain.
    pub async fn resume(&self, member: &MemberId) -> Result<MemberInfo, ControlError> {
        self.call::<(), _>(Method::POST, &format!("v1/members/{member}/resume"), None).await
    }

    /// Reports that a member seems to have failed.
    pub async fn suspect(
        &self,
        member: &MemberId,
        request: &SuspectRequest,
    ) -> Result<SuspectResponse, ControlError> {
        // A reason can quote the member, and a control plane refuses such characters.
        let request = SuspectRequest {
            reporter: escaped(&request.reporter, &[]).into_owned(),
            reason: escaped(&request.reason, &[]).into_owned(),
            incarnation: request.incarnation,
        };
        self.call(Method::POST, &format!("v1/members/{member}/suspect"), Some(&request)).await
    }

    /// Removes a member for good.
    pub async fn leave(&self, member: &MemberId) -> Result<(), ControlError> {
        self.send::<()>(Method::DELETE, &format!("v1/members/{member}"), None).await
    }

    /// Asks for a ticket. After a change of the leader the control plane may answer two seconds later, also with
    /// [`code::REQUEST_TIMEOUT`](crate::code::REQUEST_TIMEOUT): ask again.
    pub async fn ticket(&self, request: &TicketRequest) -> Result<TicketResponse, ControlError> {
        self.call(Method::POST, "v1/tickets", Some(request)).await
    }

    /// Revokes all tickets issued so far. Each call revokes anew.
    pub async fn revoke_tickets(&self) -> Result<RevokeResponse, ControlError> {
        self.call(Method::POST, "v1/tickets/revoke", None::<&()>).await
    }

    /// The validated placement table of the current model.
    pub async fn placement(&self) -> Result<PlacementTable, ControlError> {
        self.placement_of(&PlacementQuery::default()).await
    }

    /// The validated placement table of one model.
    pub async fn placement_of(
        &self,
        query: &PlacementQuery,
    ) -> Result<PlacementTable, ControlError> {
        let path = &*query.on("v1/placement");
        let (base, bytes) = self.exchange(Method::GET, path, None::<&()>).await?;
        let table = serde_json::from_slice(&bytes);
        checked(&base, path, table.map_err(|err| bad_response(&base, path, err.to_string()))?)
    }

    /// Every member, sorted by name.
    pub async fn members(&self) -> Result<Vec<MemberInfo>, ControlError> {
        let list: MemberList = self.call(Method::GET, "v1/members", None::<&()>).await?;
        Ok(list.members)
    }

    /// The digests of the model's tensors, if a member has sent them.
    pub async fn model_digests(&self) -> Result<ModelDigests, ControlError> {
        self.call(Method::GET, "v1/model/digests", None::<&()>).await
    }

    /// Sends the digests of the model's tensors. The first ones that fit the fleet's model stay, until a member sends
    /// digests of all bytes, too.
    ///
    /// # Errors
    /// [`ControlError`]. Its code is [`code::MODEL_MISMATCH`](crate::code::MODEL_MISMATCH) if the fleet has another
    /// fingerprint, or other digests of all bytes.
    pub async fn send_model_digests(&self, digests: &ModelDigests) -> Result<(), ControlError> {
        self.send(Method::PUT, "v1/model/digests", Some(digests)).await
    }

    /// The identity that the control plane sees in this client's requests.
    pub async fn whoami(&self) -> Result<WhoAmI, ControlError> {
        self.call(Method::GET, "v1/whoami", None::<&()>).await
    }

    /// The last changes of the fleet after the entry `after`; 0 for all that the control plane keeps.
    pub async fn audit(&self, after: u64) -> Result<AuditList, ControlError> {
        self.call(Method::GET, &format!("v1/audit?after={after}"), None::<&()>).await
    }

    /// Overview of the cluster.
    pub async fn status(&self) -> Result<ClusterStatus, ControlError> {
        self.call(Method::GET, "v1/status", None::<&()>).await
    }

    /// The control plane that leads, as the one that answers knows it.
    pub async fn leader(&self) -> Result<LeaderInfo, ControlError> {
        self.call(Method::GET, "v1/leader", None::<&()>).await
    }

    /// The number of servers that suits the load.
    pub async fn advice(&self) -> Result<ScalingAdvice, ControlError> {
        self.call(Method::GET, "v1/advice", None::<&()>).await
    }

    /// Goals of a fleet whose placement follows the load.
    pub async fn goals(&self) -> Result<FleetGoals, ControlError> {
        self.call(Method::GET, "v1/goals", None::<&()>).await
    }

    /// Changes the goals of a fleet whose placement follows the load. The next plan meets them.
    pub async fn set_goals(&self, goals: &FleetGoals) -> Result<FleetGoals, ControlError> {
        self.call(Method::PUT, "v1/goals", Some(goals)).await
    }

    /// Opens the stream of placement tables of the model that is current at this moment. [`crate::PlacementWatch`] uses it
    /// and reconnects.
    pub async fn watch_placement(&self) -> Result<WatchStream, ControlError> {
        self.watch_placement_of(&PlacementQuery::default()).await
    }

    /// Opens the stream of placement tables of one model.
    pub async fn watch_placement_of(
        &self,
        query: &PlacementQuery,
    ) -> Result<WatchStream, ControlError> {
        let path = &*query.on("v1/placement/watch");
        let mut attempts = Attempts::new(self).await?;
        while let Some((base, bound)) = attempts.next().await {
            let outcome = bounded(&base, path, bound, self.open_watch(&base, path)).await;
            if let Some(outcome) = attempts.settle(outcome) {
                return outcome;
            }
        }
        Err(attempts.into_error(path))
    }

    async fn open_watch(&self, base: &Url, path: &str) -> Result<WatchStream, ControlError> {
        let response = self
            .send_request(base, path, || {
                self.http.get(url(base, path)).header(ACCEPT, "text/event-stream")
            })
            .await?;
        if response.status() != StatusCode::OK {
            let status = response.status();
            let body = self.read_body(base, path, response).await?;
            return Err(self.refusal(base, path, status, &body));
        }
        Ok(WatchStream {
            parser: SseParser::new(self.options.max_response_bytes),
            client: self.clone(),
            base: base.clone(),
            response,
            events: Vec::new(),
            tables: VecDeque::new(),
        })
    }

    async fn call<Body: Serialize, Answer: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Body>,
    ) -> Result<Answer, ControlError> {
        let (base, bytes) = self.exchange(method, path, body).await?;
        serde_json::from_slice(&bytes).map_err(|err| bad_response(&base, path, err.to_string()))
    }

    async fn send<Body: Serialize>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Body>,
    ) -> Result<(), ControlError> {
        self.exchange(method, path, body).await.map(drop)
    }

    /// The body of a successful response, and the control plane that sent it.
    async fn exchange<Body: Serialize>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Body>,
    ) -> Result<(Url, Vec<u8>), ControlError> {
        let mut attempts = Attempts::new(self).await?;
        while let Some((base, bound)) = attempts.next().await {
            let exchange = self.exchange_with(&base, method.clone(), path, body);
            let outcome = bounded(&base, path, bound, exchange).await;
            if let Some(outcome) = attempts.settle(outcome) {
                return outcome.map(|body| (base, body));
            }
        }
        Err(attempts.into_error(path))
    }

    async fn exchange_with<Body: Serialize>(
        &self,
        base: &Url,
        method: Method,
        path: &str,
        body: Option<&Body>,
    ) -> Result<Vec<u8>, ControlError> {
        let response = self
            .send_request(base, path, || {
                let request = self.http.request(method.clone(), url(base, path));
                match body {
                    Some(body) => request.json(body),
                    None => request,
                }
            })
            .await?;
        let status = response.status();
        let body = self.read_body(base, path, response).await?;
        if status.is_success() { Ok(body) } else { Err(self.refusal(base, path, status, &body)) }
    }

    /// Sends a request with the token. Sends it again with the token file's newer token if the first one is refused, and
    /// on a new connection if the certificate of the open one has ended.
    async fn send_request(
        &self,
        base: &Url,
        path: &str,
        request: impl Fn() -> reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, ControlError> {
        let send = async |token: Option<HeaderValue>| {
            let headers: HeaderMap =
                token.map(|token| (AUTHORIZATION, token)).into_iter().collect();
            let sent = request().headers(headers).send().await;
            sent.map_err(|err| unreachable(base, path, &err))
        };
        let token = self.token.current();
        let mut response = send(token.clone()).await?;
        if response.status() == StatusCode::MISDIRECTED_REQUEST {
            response = send(token.clone()).await?;
        }
        if response.status() == StatusCode::UNAUTHORIZED
            && let Some(newer) = self.token.read_again(token).await
        {
            return send(Some(newer)).await;
        }
        Ok(response)
    }

    fn refusal(&self, base: &Url, path: &str, status: StatusCode, body: &[u8]) -> ControlError {
        let has_token = self.token.current().is_some();
        if body.starts_with(HTTPS_ONLY) {
            let reason = "it speaks HTTPS only: use https:// in the URL, and --tls DIR".to_owned();
            return ControlError::Tls { url: url(base, path), reason };
        }
        let error: ApiError = match serde_json::from_slice(body) {
            Ok(error) => error,
            Err(_) => {
                let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
                return bad_response(base, path, format!("status {status}, body {text:?}"));
            }
        };
        match status {
            StatusCode::UNAUTHORIZED => ControlError::Unauthorized {
                url: url(base, path),
                message: error.message,
                has_token,
            },
            _ => ControlError::Rejected {
                status: status.as_u16(),
                code: error.code,
                message: error.message,
            },
        }
    }

    async fn read_body(
        &self,
        base: &Url,
        path: &str,
        mut response: reqwest::Response,
    ) -> Result<Vec<u8>, ControlError> {
        let mut body = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|err| unreachable(base, path, &err))?
        {
            if body.len() + chunk.len() > self.options.max_response_bytes {
                let limit = self.options.max_response_bytes;
                return Err(bad_response(base, path, format!("more than {limit} bytes")));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlClient")
            .field("base_url", &self.base_url())
            .field("has_token", &self.token.current().is_some())
            .finish_non_exhaustive()
    }
}

/// Attempts of one request at one control plane after the other. The client's timeout bounds all of them together;
/// each leaves time for those behind it.
struct Attempts<'a> {
    client: &'a ControlClient,
    deadline: Instant,
    snapshot: Snapshot,
    /// Control planes of the snapshot that have been asked.
    num_begun: usize,
    /// Control planes that have been asked before the last lookup.
    asked: Vec<Url>,
    /// True if a new lookup may find others.
    may_look_up: bool,
    /// The first error is about the control plane that answered last.
    error: Option<ControlError>,
}

impl<'a> Attempts<'a> {
    async fn new(client: &'a ControlClient) -> Result<Self, ControlError> {
        let timeout = client.options.timeout;
        let deadline = Instant::now() + timeout;
        let snapshot = client.planes.list(timeout).await?;
        Ok(Self {
            client,
            deadline,
            snapshot,
            num_begun: 0,
            asked: Vec::new(),
            may_look_up: !client.planes.is_fixed(),
            error: None,
        })
    }

    /// The next control plane and the timeout of its attempt.
    async fn next(&mut self) -> Option<(Url, Duration)> {
        loop {
            let num_left = self.snapshot.urls.len() - self.num_begun;
            if num_left == 0 {
                self.look_up().await?;
                continue;
            }
            let left = match self.num_begun {
                0 if !self.may_look_up && self.asked.is_empty() => self.client.options.timeout,
                _ => self.left(),
            };
            // A lookup needs its part of the time, too.
            let num_parts = num_left + usize::from(self.may_look_up);
            let base = self.at(self.num_begun);
            self.num_begun += 1;
            if !self.asked.contains(&base) {
                return Some((base, left / num_parts as u32));
            }
        }
    }

    /// Looks up control planes once more, after all that were known have failed.
    async fn look_up(&mut self) -> Option<()> {
        if !std::mem::take(&mut self.may_look_up) {
            return None;
        }
        self.asked = self.snapshot.urls.to_vec();
        let found = self.client.planes.list_again(self.left()).await;
        self.snapshot = found.inspect_err(|err| debug!(error = %err, "no other found")).ok()?;
        self.num_begun = 0;
        Some(())
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn at(&self, index: usize) -> Url {
        let Snapshot { urls, first } = &self.snapshot;
        urls[(first + index) % urls.len()].clone()
    }

    /// Returns the outcome of an attempt unless another control plane should be asked.
    fn settle<T>(&mut self, outcome: Result<T, ControlError>) -> Option<Result<T, ControlError>> {
        match outcome {
            Err(err) if err.concerns_one_control_plane() => {
                self.error.get_or_insert(err);
                None
            }
            outcome => {
                self.client.planes.remember(&self.at(self.num_begun - 1));
                Some(outcome)
            }
        }
    }

    /// The error of all attempts.
    fn into_error(self, path: &str) -> ControlError {
        // So that a request with a longer timeout does not wait for the same control plane again.
        let first = self.at(0);
        self.client.planes.turn_away_from(&first);
        self.error.unwrap_or_else(|| timed_out(&first, path, self.client.options.timeout))
    }
}

/// An open stream of placement tables.
#[derive(Debug)]
pub struct WatchStream {
    client: ControlClient,
    base: Url,
    response: reqwest::Response,
    parser: SseParser,
    events: Vec<crate::sse::SseEvent>,
    tables: VecDeque<PlacementTable>,
}

impl WatchStream {
    /// The next validated table. After an error, drop the stream and open a new one, which goes to another control
    /// plane if there are several.
    ///
    /// # Errors
    /// [`ControlError`] when the stream breaks, is silent for
    /// [`watch_idle_timeout`](ClientOptions::watch_idle_timeout), or sends an invalid table.
    pub async fn next(&mut self) -> Result<PlacementTable, ControlError> {
        let table = self.read().await;
        if table.is_err() {
            self.client.planes.turn_away_from(&self.base);
        }
        table
    }

    async fn read(&mut self) -> Result<PlacementTable, ControlError> {
        let path = "v1/placement/watch";
        let base = &self.base;
        loop {
            if let Some(table) = self.tables.pop_front() {
                return Ok(table);
            }
            let idle = self.client.options.watch_idle_timeout;
            let chunk = tokio::time::timeout(idle, self.response.chunk()).await;
            let chunk = chunk.map_err(|_| timed_out(base, path, idle))?;
            let chunk = chunk.map_err(|err| unreachable(base, path, &err))?;
            let Some(chunk) = chunk else {
                return Err(ControlError::Unreachable {
                    url: url(base, path),
                    reason: "the stream was closed".to_owned(),
                });
            };
            let pushed = self.parser.push(&chunk, &mut self.events);
            pushed.map_err(|err| bad_response(base, path, err.to_string()))?;
            for event in self.events.drain(..) {
                if event.kind != PLACEMENT_EVENT {
                    continue;
                }
                let table = serde_json::from_slice(&event.data);
                let table = table.map_err(|err| bad_response(base, path, err.to_string()))?;
                self.tables.push_back(checked(base, path, table)?);
            }
        }
    }
}

async fn bounded<T>(
    base: &Url,
    path: &str,
    bound: Duration,
    exchange: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    let outcome = tokio::time::timeout(bound, exchange).await;
    outcome.unwrap_or_else(|_| Err(timed_out(base, path, bound)))
}

fn checked(base: &Url, path: &str, table: PlacementTable) -> Result<PlacementTable, ControlError> {
    match table.validate() {
        Ok(()) => Ok(table),
        Err(source) => Err(ControlError::BadPlacement { url: url(base, path), source }),
    }
}

fn url(base: &Url, path: &str) -> String {
    format!("{}/{path}", text_of(base))
}

fn bad_response(base: &Url, path: &str, reason: String) -> ControlError {
    ControlError::BadResponse { url: url(base, path), reason }
}

fn timed_out(base: &Url, path: &str, timeout: Duration) -> ControlError {
    ControlError::Timeout { url: url(base, path), timeout_ms: timeout.as_millis() as u64 }
}

fn unreachable(base: &Url, path: &str, err: &reqwest::Error) -> ControlError {
    if let Some(reason) = explain(Side::Client, err) {
        return ControlError::Tls { url: url(base, path), reason };
    }
    ControlError::Unreachable { url: url(base, path), reason: causes(err) }
}

fn build_http(
    options: &ClientOptions,
    planes: &Arc<ControlPlanes>,
) -> Result<reqwest::Client, ConfigError> {
    // Ignore proxies from the environment: the control plane is in the same network. Drop an idle
    // connection before the server closes it during a request.
    let http = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.timeout)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .tls_backend_preconfigured(options.security.client_config_with_names(planes.clone()))
        .user_agent(concat!("switchyard/", env!("CARGO_PKG_VERSION")))
        .build();
    http.map_err(|err| ConfigError::Setup { reason: causes(&err) })
}

fn parse_base_url(text: &str) -> Result<Url, ConfigError> {
    let fail = |reason: &str| ConfigError::Url { url: text.to_owned(), reason: reason.to_owned() };
    let url = Url::parse(text).map_err(|err| fail(&err.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(fail(&format!("scheme {:?}", url.scheme())));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(fail("no host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(fail(CREDENTIALS_INSIDE));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(fail("query or fragment inside"));
    }
    Ok(url)
}

/// Checks that every control plane can be asked as the settings say.
fn check_security(
    planes: &ControlPlanes,
    has_token: bool,
    security: &Security,
) -> Result<(), ConfigError> {
    for Target { text: url, scheme, host } in planes.targets() {
        let is_local = host.is_some_and(|host| is_loopback_host(&host));
        match scheme {
            "https" if security.for_client().is_none() => {
                return Err(ConfigError::NeedsTls { url });
            }
            // With certificates, a plain URL is a slip, and tickets would travel over it.
            "http"
                if (has_token || security.for_client().is_some())
                    && !is_local
                    && !security.insecure =>
            {
                return Err(ConfigError::Insecure { url });
            }
            _ => {}
        }
    }
    Ok(())
}

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);
const DEFAULT_WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Beginning of the answer of a port for HTTPS to a request in plain HTTP.
const HTTPS_ONLY: &[u8] = b"This port speaks HTTPS";
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// The `event` field of a table on the watch stream.
const PLACEMENT_EVENT: &str = "placement";
