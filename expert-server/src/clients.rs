//! The listening side: judges clients, hands their channels to the data thread, and watches over their
//! connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use control_api::LeaseKeeper;
use p2p_core::AnyEndpoint;
use p2p_core::bootstrap::{Connection, Listener, PeerHello, Reject, RejectCode};
use protocol::{
    ClientHello, DispatchExpect, FrameGeometry, HelloReject, ModelShape, ServerHello, WireDtype,
};
use tokio::sync::watch;

use crate::data::DataPlane;
use crate::status::Health;

/// What the listener's tasks know of the server.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) shape: ModelShape,
    pub(crate) frame_bytes: usize,
    pub(crate) incarnation: u64,
    pub(crate) health: Arc<Health>,
    pub(crate) keeper: Option<Arc<LeaseKeeper>>,
    pub(crate) data: Arc<DataPlane<AnyEndpoint>>,
}

impl Host {
    /// Judges a client and answers its hello.
    fn accept(&self, hello: &PeerHello) -> Result<Vec<u8>, Reject> {
        self.judge(hello)
            .map_err(|reject| Reject::new(RejectCode(reject.code()), reject.to_string()))?;
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

    fn judge(&self, hello: &PeerHello) -> Result<DispatchExpect, HelloReject> {
        if self.health.is_draining.load(Ordering::Relaxed) {
            return Err(HelloReject::Draining { server: self.name.clone() });
        }
        let client = ClientHello::decode(&hello.payload)?;
        client.model.check_against(&self.shape)?;
        let geometry =
            geometry(&self.shape, self.frame_bytes, client.dtype, client.response_dtype)?;
        Ok(DispatchExpect {
            client_id: client.client_id,
            generation: hello.generation,
            hidden: self.shape.hidden as usize,
            num_layers: self.shape.num_layers,
            num_experts: self.shape.num_experts,
            max_tokens: geometry.max_tokens(),
            top_k: self.shape.top_k as usize,
            dtype: client.dtype,
            response_dtype: client.response_dtype,
        })
    }

    /// Hands a connected client to the data thread and watches over its connection.
    fn take(self: &Arc<Self>, connection: Connection) {
        let Connection { channel, liveness, peer, remote_addr, .. } = connection;
        let expect = match self.judge(&peer) {
            Ok(expect) => expect,
            Err(error) => {
                // It was accepted a moment ago; by now the server drains.
                tracing::info!(%remote_addr, %error, "a client came too late");
                return;
            }
        };
        tracing::debug!(%remote_addr, client = expect.client_id, generation = expect.generation, "a client connected");
        let (id, mut ended) = self.data.attach(channel, expect);
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
            if let Ok(ended) = ended {
                tracing::debug!(link = %id, reason = ended.reason.name(), "a link ended");
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
