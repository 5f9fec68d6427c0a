//! Requests and their responses, from a request's head to the end of the response's body.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, CONTENT_LENGTH, HeaderValue};
use hyper::service::Service;
use hyper::{Response, StatusCode};
use trust::tls::PeerCertificate;

use crate::PeerAddr;
use crate::places::{Place, Standing};

/// A service that keeps its connection out of the idle ones while a request is open: from its head to the end
/// of the response's body.
pub(crate) struct TrackRequests<S> {
    pub(crate) inner: S,
    pub(crate) place: Arc<Place>,
    pub(crate) addr: PeerAddr,
    /// Of the client, if it has shown one.
    pub(crate) certificate: Option<PeerCertificate>,
}

impl<S> Service<hyper::Request<Incoming>> for TrackRequests<S>
where
    S: Service<hyper::Request<Incoming>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn call(&self, mut request: hyper::Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.addr);
        request.extensions_mut().insert(Standing(Arc::clone(&self.place)));
        if let Some(certificate) = &self.certificate {
            if !certificate.is_accepted() {
                return Box::pin(async { Ok(certificate_ended()) });
            }
            if let Some(identity) = certificate.identity() {
                request.extensions_mut().insert(identity.clone());
            }
        }
        self.place.begin();
        let open = OpenRequest(Arc::clone(&self.place));
        let response = self.inner.call(request);
        let certificate = self.certificate.clone();
        Box::pin(async move {
            let response = response.await?;
            // A body of known length is complete soon, and its end would be an error for the client.
            let is_endless = !response.headers().contains_key(CONTENT_LENGTH)
                && response.body().size_hint().exact().is_none();
            let ended = certificate.filter(|_| is_endless).map(|certificate| {
                let ended: Ended = Box::pin(async move { certificate.ended().await });
                ended
            });
            Ok(response.map(|inner| Body::new(TrackedBody { inner, ended, _open: open })))
        })
    }
}

/// The answer to a request on a connection whose certificate is no longer accepted. By RFC 9110, section 15.5.20, a
/// client may send the request again over another connection.
fn certificate_ended() -> Response<Body> {
    let mut response = Response::new(Body::from(CERTIFICATE_ENDED));
    *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A request until its response is complete.
struct OpenRequest(Arc<Place>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The body of a response. hyper drops it when all of it is in its buffer or written.
struct TrackedBody {
    inner: Body,
    /// Of a stream: completes when the client's certificate is no longer accepted.
    ended: Option<Ended>,
    _open: OpenRequest,
}

impl HttpBody for TrackedBody {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Some(ended) = &mut self.ended
            && ended.as_mut().poll(cx).is_ready()
        {
            (self.ended, self.inner) = (None, Body::empty());
        }
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

type Ended = Pin<Box<dyn Future<Output = ()> + Send>>;

const CERTIFICATE_ENDED: &str =
    "The certificate of this connection is no longer accepted: connect again with a valid one.\n";
