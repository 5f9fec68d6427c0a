//! The HTTP client: one call per request, with a timeout and a typed error.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Method, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ApiError, ConfigError, ControlError};
use crate::placement::PlacementTable;
use crate::sse::SseParser;
use crate::types::{
    ClusterStatus, DrainRequest, FleetGoals, LeaseRequest, LeaseResponse, MemberId, MemberInfo,
    MemberList, ModelDigests, ReadyRequest, RegisterRequest, RegisterResponse, ScalingAdvice,
    SuspectRequest, SuspectResponse,
};

/// Limits of a [`ControlClient`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Timeout of a request, including connecting. Default: 3 s.
    pub timeout: Duration,
    /// Timeout of a silent watch stream. Default: 5 s. The server sends a keep-alive about once a second.
    pub watch_idle_timeout: Duration,
    /// Largest response and largest watch event in bytes. Default: 64 MiB.
    pub max_response_bytes: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            timeout: DEFAULT_TIMEOUT,
            watch_idle_timeout: DEFAULT_WATCH_IDLE_TIMEOUT,
            max_response_bytes: DEFAULT_MAX_RESPONSE_BYTES,
        }
    }
}

/// Client of one control plane. Cheap to clone; clones share connections.
///
/// Its methods need a tokio runtime with time and I/O enabled.
#[derive(Clone)]
pub struct ControlClient {
    http: reqwest::Client,
    base: Url,
    token: Option<HeaderValue>,
    options: ClientOptions,
}

impl ControlClient {
    /// A client of the control plane at `base_url` (`http://HOST:PORT`), with default limits. Sends
    /// nothing yet.
    ///
    /// # Errors
    /// [`ConfigError`] when the URL or the token is malformed, or the HTTP client cannot be set up.
    pub fn new(base_url: &str, token: Option<String>) -> Result<Self, ConfigError> {
        Self::with_options(base_url, token, ClientOptions::default())
    }

    /// As [`new`](Self::new), with given limits.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_options(
        base_url: &str,
        token: Option<String>,
        options: ClientOptions,
    ) -> Result<Self, ConfigError> {
        let base = parse_base_url(base_url)?;
        let token = match token {
            None => None,
            Some(token) => {
                let visible = token.bytes().all(|byte| byte.is_ascii_graphic());
                let value = HeaderValue::from_str(&format!("Bearer {token}"));
                let mut value = value.map_err(|_| ConfigError::Token)?;
                if !visible || token.is_empty() {
                    return Err(ConfigError::Token);
                }
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self { http: build_http(&options)?, base, token, options })
    }

    /// A client of the same control plane that shares no connections with this one. Use it on another
    /// runtime.
    ///
    /// # Errors
    /// [`ConfigError::Setup`] when the HTTP client cannot be set up.
    pub fn isolated(&self) -> Result<Self, ConfigError> {
        Ok(Self { http: build_http(&self.options)?, ..self.clone() })
    }

    /// The same client with another timeout for requests.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let mut client = self.clone();
        client.options.timeout = timeout;
        client
    }

    /// The URL of the control plane.
    pub fn base_url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
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
        self.call(Method::POST, &format!("v1/members/{member}/suspect"), Some(request)).await
    }

    /// Removes a member for good.
    pub async fn leave(&self, member: &MemberId) -> Result<(), ControlError> {
        self.send::<()>(Method::DELETE, &format!("v1/members/{member}"), None).await.map(drop)
    }

    /// The validated placement table in force.
    pub async fn placement(&self) -> Result<PlacementTable, ControlError> {
        let table: PlacementTable = self.call(Method::GET, "v1/placement", None::<&()>).await?;
        self.checked(table, "v1/placement")
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
        self.send(Method::PUT, "v1/model/digests", Some(digests)).await.map(drop)
    }

    /// Overview of the cluster.
    pub async fn status(&self) -> Result<ClusterStatus, ControlError> {
        self.call(Method::GET, "v1/status", None::<&()>).await
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

    /// Opens the stream of placement tables. [`crate::PlacementWatch`] uses it and reconnects.
    pub async fn watch_placement(&self) -> Result<WatchStream, ControlError> {
        let path = "v1/placement/watch";
        let request = self.request(Method::GET, path).header(ACCEPT, "text/event-stream");
        let response = self.bounded(path, request.send()).await?;
        let response = response.map_err(|err| self.unreachable(path, &err))?;
        if response.status() != StatusCode::OK {
            let status = response.status();
            let body = self.bounded(path, self.read_body(path, response)).await??;
            return Err(self.refusal(path, status, &body));
        }
        Ok(WatchStream {
            parser: SseParser::new(self.options.max_response_bytes),
            client: self.clone(),
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
        let bytes = self.send(method, path, body).await?;
        serde_json::from_slice(&bytes).map_err(|err| self.bad_response(path, err.to_string()))
    }

    /// The body of a successful response.
    async fn send<Body: Serialize>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Body>,
    ) -> Result<Vec<u8>, ControlError> {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(body);
        }
        let exchange = async {
            let response = request.send().await.map_err(|err| self.unreachable(path, &err))?;
            let status = response.status();
            Ok((status, self.read_body(path, response).await?))
        };
        let (status, body) = self.bounded(path, exchange).await??;
        if status.is_success() { Ok(body) } else { Err(self.refusal(path, status, &body)) }
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let mut headers = HeaderMap::new();
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        self.http.request(method, self.url(path)).headers(headers)
    }

    async fn read_body(
        &self,
        path: &str,
        mut response: reqwest::Response,
    ) -> Result<Vec<u8>, ControlError> {
        let mut body = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|err| self.unreachable(path, &err))?
        {
            if body.len() + chunk.len() > self.options.max_response_bytes {
                let limit = self.options.max_response_bytes;
                return Err(self.bad_response(path, format!("more than {limit} bytes")));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    async fn bounded<F: Future>(&self, path: &str, future: F) -> Result<F::Output, ControlError> {
        let timeout = self.options.timeout;
        tokio::time::timeout(timeout, future).await.map_err(|_| ControlError::Timeout {
            url: self.url(path),
            timeout_ms: timeout.as_millis() as u64,
        })
    }

    fn refusal(&self, path: &str, status: StatusCode, body: &[u8]) -> ControlError {
        let error: ApiError = match serde_json::from_slice(body) {
            Ok(error) => error,
            Err(_) => {
                let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
                return self.bad_response(path, format!("status {status}, body {text:?}"));
            }
        };
        match status {
            StatusCode::UNAUTHORIZED => {
                ControlError::Unauthorized { url: self.url(path), message: error.message }
            }
            _ => ControlError::Rejected {
                status: status.as_u16(),
                code: error.code,
                message: error.message,
            },
        }
    }

    fn checked(&self, table: PlacementTable, path: &str) -> Result<PlacementTable, ControlError> {
        match table.validate() {
            Ok(()) => Ok(table),
            Err(source) => Err(ControlError::BadPlacement { url: self.url(path), source }),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.base_url())
    }

    fn bad_response(&self, path: &str, reason: String) -> ControlError {
        ControlError::BadResponse { url: self.url(path), reason }
    }

    fn unreachable(&self, path: &str, err: &reqwest::Error) -> ControlError {
        ControlError::Unreachable { url: self.url(path), reason: causes(err) }
    }
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlClient")
            .field("base_url", &self.base_url())
            .field("has_token", &self.token.is_some())
            .finish_non_exhaustive()
    }
}

/// An open stream of placement tables.
#[derive(Debug)]
pub struct WatchStream {
    client: ControlClient,
    response: reqwest::Response,
    parser: SseParser,
    events: Vec<crate::sse::SseEvent>,
    tables: VecDeque<PlacementTable>,
}

impl WatchStream {
    /// The next validated table. After an error, drop the stream and open a new one.
    ///
    /// # Errors
    /// [`ControlError`] when the stream breaks, is silent for
    /// [`watch_idle_timeout`](ClientOptions::watch_idle_timeout), or sends an invalid table.
    pub async fn next(&mut self) -> Result<PlacementTable, ControlError> {
        let path = "v1/placement/watch";
        loop {
            if let Some(table) = self.tables.pop_front() {
                return Ok(table);
            }
            let idle = self.client.options.watch_idle_timeout;
            let chunk = tokio::time::timeout(idle, self.response.chunk()).await;
            let chunk = chunk.map_err(|_| ControlError::Timeout {
                url: self.client.url(path),
                timeout_ms: idle.as_millis() as u64,
            })?;
            let chunk = chunk.map_err(|err| self.client.unreachable(path, &err))?;
            let Some(chunk) = chunk else {
                return Err(ControlError::Unreachable {
                    url: self.client.url(path),
                    reason: "the stream was closed".to_owned(),
                });
            };
            let pushed = self.parser.push(&chunk, &mut self.events);
            pushed.map_err(|err| self.client.bad_response(path, err.to_string()))?;
            for event in self.events.drain(..) {
                if event.kind != PLACEMENT_EVENT {
                    continue;
                }
                let table = serde_json::from_slice(&event.data);
                let table = table.map_err(|err| self.client.bad_response(path, err.to_string()))?;
                self.tables.push_back(self.client.checked(table, path)?);
            }
        }
    }
}

fn build_http(options: &ClientOptions) -> Result<reqwest::Client, ConfigError> {
    // Ignore proxies from the environment: the control plane is in the same network. Drop an idle
    // connection before the server closes it during a request.
    let http = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.timeout)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .user_agent(concat!("switchyard/", env!("CARGO_PKG_VERSION")))
        .build();
    http.map_err(|err| ConfigError::Setup { reason: causes(&err) })
}

fn parse_base_url(text: &str) -> Result<Url, ConfigError> {
    let fail = |reason: &str| ConfigError::Url { url: text.to_owned(), reason: reason.to_owned() };
    let url = Url::parse(text).map_err(|err| fail(&err.to_string()))?;
    if url.scheme() == "https" {
        return Err(fail("https is not supported by this build"));
    }
    if url.scheme() != "http" {
        return Err(fail(&format!("scheme {:?}", url.scheme())));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(fail("no host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(fail("user name or password inside: pass a token instead"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(fail("query or fragment inside"));
    }
    Ok(url)
}

/// The chain of causes without the repetitions that wrapping errors produce.
fn causes(err: &dyn std::error::Error) -> String {
    let mut texts = vec![err.to_string()];
    let mut source = err.source();
    while let Some(err) = source {
        let text = err.to_string();
        if !texts.iter().any(|known| known.contains(&text)) {
            texts.push(text);
        }
        source = err.source();
    }
    // The outermost message of the HTTP library only repeats the URL.
    if texts.len() > 1 {
        texts.remove(0);
    }
    texts.join(": ")
}

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);
const DEFAULT_WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_MAX_RESPONSE_BYTES: usize = 64 << 20;
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// The `event` field of a table on the watch stream.
const PLACEMENT_EVENT: &str = "placement";
