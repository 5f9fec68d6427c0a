//! The listening side: admits clients, hands their channels to the data thread, and watches their connections.

use std::sync::Arc;

use control_api::LeaseKeeper;
use p2p_core::TransportKind;
use p2p_core::bootstrap::{Connection, Listener, PeerHello, Reject, RejectCode};
use protocol::{
    ClientHello, DispatchExpect, FrameGeometry, HelloReject, ModelShape, ServerHello, WireDtype,
};
use tokio::sync::watch;

use crate::plane::DataPlane;
use crate::status::Health;

/// The parts of a server that decide which clients are admitted and where their channels go.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(crate) name: String,
    pub(crate) shape: ModelShape,
    pub(crate) frames: FrameLimits,
    pub(crate) incarnation: u64,
    pub(crate) health: Arc<Health>,
    pub(crate) keeper: Option<Arc<LeaseKeeper>>,
    pub(crate) data: Arc<dyn DataPlane>,
}

/// Limits of clients' frames.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FrameLimits {
    /// Any element types, and as many tokens as fit a frame of so many bytes.
    AnyType { frame_bytes: usize },
    /// Requests of one type, answers in bf16, and a number of tokens that both sides agreed on in the handshake.
    #[cfg(feature = "device")]
    OneType { dtype: WireDtype, max_tokens: usize },
}

impl Admission {
    /// Checks a client's hello and returns the server's.
    fn accept(&self, hello: &PeerHello) -> Result<Vec<u8>, Reject> {
        self.check(hello)?;
        let epoch = self.keeper.as_ref().map_or(0, |keeper| keeper.state().borrow().epoch);
        let reply = ServerHello {
            model: self.shape,
            incarnation: self.incarnation,
            epoch,
            generation: hello.generation,
            progress_interval_us: PROGRESS_INTERVAL_US,
            name: self.name.clone(),
        };
        Ok(reply.encode())
    }

    fn check(&self, hello: &PeerHello) -> Result<DispatchExpect, Reject> {
        let refused =
            |reject: HelloReject| Reject::new(RejectCode(reject.code()), reject.to_string());
        if self.health.refuses_clients() {
            return Err(refused(HelloReject::Draining { server: self.name.clone() }));
        }
        let client = ClientHello::decode(&hello.payload).map_err(|e| refused(e.into()))?;
        client.model.check_against(&self.shape).map_err(refused)?;
        let max_tokens = match self.frames {
            FrameLimits::AnyType { frame_bytes } => {
                geometry(&self.shape, frame_bytes, client.dtype, client.response_dtype)
                    .map_err(|e| refused(e.into()))?
                    .max_tokens()
            }
            #[cfg(feature = "device")]
            FrameLimits::OneType { dtype, max_tokens } => {
                if (client.dtype, client.response_dtype) != (dtype, WireDtype::Bf16) {
                    let message = format!(
                        "this server's GPU takes requests in {dtype} and answers in bf16, the client wants {} and {}; set both alike",
                        client.dtype, client.response_dtype
                    );
                    return Err(Reject::new(RejectCode::DEVICE, message));
                }
                max_tokens
            }
        };
        Ok(DispatchExpect {
            client_id: client.client_id,
            generation: hello.generation,
            hidden: self.shape.hidden as usize,
            num_layers: self.shape.num_layers,
            num_experts: self.shape.num_experts,
            max_tokens,
            top_k: self.shape.top_k as usize,
            dtype: client.dtype,
            response_dtype: client.response_dtype,
        })
    }

    /// Hands a connected client to the data thread and watches its connection.
    fn attach(self: &Arc<Self>, connection: Connection) {
        let Connection { channel, device, liveness, peer, remote_addr, left_out, .. } = connection;
        let expect = match self.check(&peer) {
            Ok(expect) => expect,
            Err(error) => {
                // The server accepted the client a moment ago and has begun to drain since.
                tracing::info!(%remote_addr, %error, "a client came too late");
                tokio::task::spawn_blocking(move || {
                    drop((channel, device));
                    drop(liveness);
                });
                return;
            }
        };
        tracing::debug!(%remote_addr, client = expect.client_id, generation = expect.generation, "a client connected");
        let kind = match device {
            Some(_) if !channel.kind().is_network() => TransportKind::CudaIpc,
            _ => channel.kind(),
        };
        let note = (!left_out.is_empty()).then(|| {
            tracing::info!(%remote_addr, client = expect.client_id, transport = kind.name(), left_out, "a client cannot use a better transport");
            self.data.load().note_left_out(kind, left_out)
        });
        let client = expect.client_id;
        let Some((id, mut end)) = self.data.attach(channel, device, expect) else {
            tracing::error!(%remote_addr, "a client with slots of the wrong kind was admitted");
            return;
        };
        let data = Arc::clone(&self.data);
        tokio::spawn(async move {
            let closed = tokio::select! {
                closed = &mut end => closed,
                reason = liveness.closed() => {
                    tracing::debug!(link = %id, client, %reason, "a client is gone");
                    data.detach(id);
                    end.await
                }
            };
            // Before the slots are unmapped, so that the client learns of the end first.
            liveness.close();
            drop(note);
            if let Some(closed) = closed {
                tracing::debug!(link = %id, reason = closed.reason.name(), "a link closed");
                // Unmapping can block: a proxy posts for a moment longer, and a GPU may have to finish a kernel.
                // The connection ends last, so that the memory is free when another client takes this place.
                tokio::task::spawn_blocking(move || {
                    drop(closed);
                    drop(liveness);
                });
            }
        });
    }
}

/// Serves clients until `stopped` turns true or its sender is dropped.
pub(crate) async fn serve_clients(
    listener: Listener,
    admission: Arc<Admission>,
    mut stopped: watch::Receiver<bool>,
) {
    let on_peer = Arc::clone(&admission);
    let shutdown = async move {
        // An error means that the server itself was dropped.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    listener
        .serve(
            move |hello| admission.accept(hello),
            move |connection| on_peer.attach(connection),
            shutdown,
        )
        .await;
}

/// Layout of frames of `frame_bytes`, with the number of tokens that fit one.
pub(crate) fn geometry(
    shape: &ModelShape,
    frame_bytes: usize,
    dtype: WireDtype,
    response_dtype: WireDtype,
) -> Result<FrameGeometry, protocol::GeometryError> {
    let (hidden, top_k) = (shape.hidden as usize, shape.top_k as usize);
    FrameGeometry::new(frame_bytes, hidden, dtype, response_dtype, top_k)
}

/// Interval of progress marks that the server announces to clients, in µs: twice the data thread's own.
const PROGRESS_INTERVAL_US: u32 = 2000;
