//! The listening side: judges clients, hands their channels to the data thread, and watches over their
//! connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use control_api::LeaseKeeper;
use p2p_core::TransportKind;
use p2p_core::bootstrap::{Connection, Listener, PeerHello, Reject, RejectCode};
use protocol::{
    ClientHello, DispatchExpect, FrameGeometry, HelloReject, ModelShape, ServerHello, WireDtype,
};
use tokio::sync::watch;

use crate::plane::Plane;
use crate::status::Health;

/// What the listener's tasks know of the server.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) shape: ModelShape,
    pub(crate) frames: Frames,
    pub(crate) incarnation: u64,
    pub(crate) health: Arc<Health>,
    pub(crate) keeper: Option<Arc<LeaseKeeper>>,
    pub(crate) data: Arc<Plane>,
}

/// What a client's frames may be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Frames {
    /// In slots of the host: any types, and as many tokens as fit.
    Host {
        /// Bytes of a frame.
        frame_bytes: usize,
    },
    /// In device slots, whose layout both sides agreed on in the handshake.
    Device {
        /// Type of requests; answers are bf16.
        dtype: WireDtype,
        /// Tokens of a frame.
        max_tokens: usize,
    },
}

impl Host {
    /// Judges a client and answers its hello.
    fn accept(&self, hello: &PeerHello) -> Result<Vec<u8>, Reject> {
        self.judge(hello)?;
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

    fn judge(&self, hello: &PeerHello) -> Result<DispatchExpect, Reject> {
        let refused =
            |reject: HelloReject| Reject::new(RejectCode(reject.code()), reject.to_string());
        if self.health.is_draining.load(Ordering::Relaxed) {
            return Err(refused(HelloReject::Draining { server: self.name.clone() }));
        }
        let client = ClientHello::decode(&hello.payload).map_err(|e| refused(e.into()))?;
        client.model.check_against(&self.shape).map_err(refused)?;
        let max_tokens = match self.frames {
            Frames::Host { frame_bytes } => {
                geometry(&self.shape, frame_bytes, client.dtype, client.response_dtype)
                    .map_err(|e| refused(e.into()))?
                    .max_tokens()
            }
            Frames::Device { dtype, max_tokens } => {
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

    /// Hands a connected client to the data thread and watches over its connection.
    fn take(self: &Arc<Self>, connection: Connection) {
        let Connection { channel, device, liveness, peer, remote_addr, left_out, .. } = connection;
        let expect = match self.judge(&peer) {
            Ok(expect) => expect,
            Err(error) => {
                // It was accepted a moment ago; by now the server drains.
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
        // Another kind of pair than this server offered cannot come; `attach` then refuses the client.
        let device = device.and_then(|slots| slots.downcast().ok());
        let Some((id, mut ended)) = self.data.attach(channel, device, expect) else {
            tracing::error!(%remote_addr, "a client of another kind was let in");
            return;
        };
        let data = Arc::clone(&self.data);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = &mut ended => ended,
                reason = liveness.closed() => {
                    tracing::debug!(link = %id, client = expect.client_id, %reason, "a client is gone");
                    data.detach(id);
                    ended.await
                }
            };
            // The client learns of the end before the slots go.
            liveness.close();
            drop(note);
            if let Some(ended) = ended {
                tracing::debug!(link = %id, reason = ended.reason.name(), "a link ended");
                // A proxy posts on for a moment, and a GPU may have to end a kernel. Whoever gets the client's
                // place finds the memory free.
                tokio::task::spawn_blocking(move || {
                    drop(ended);
                    drop(liveness);
                });
            }
        });
    }
}

/// Takes clients until `stopped` turns true or its sender is gone.
pub(crate) async fn serve_clients(
    listener: Listener,
    host: Arc<Host>,
    mut stopped: watch::Receiver<bool>,
) {
    let on_peer = Arc::clone(&host);
    let shutdown = async move {
        // An error means that the server is gone altogether.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    listener
        .serve(
            move |hello| host.accept(hello),
            move |connection| on_peer.take(connection),
            shutdown,
        )
        .await;
}

/// How many tokens a client's frames hold.
pub(crate) fn geometry(
    shape: &ModelShape,
    frame_bytes: usize,
    dtype: WireDtype,
    response_dtype: WireDtype,
) -> Result<FrameGeometry, protocol::GeometryError> {
    let (hidden, top_k) = (shape.hidden as usize, shape.top_k as usize);
    FrameGeometry::new(frame_bytes, hidden, dtype, response_dtype, top_k)
}

/// What clients are told about the pace of progress: twice the data thread's own.
const PROGRESS_INTERVAL_US: u32 = 2000;
