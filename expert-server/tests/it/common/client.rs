//! A plain client for tests.

use std::time::{Duration, Instant};

use p2p_core::wait::wait_until;
use p2p_core::{Channel, SpinPolicy, Transport, TxFrame, WaitSet};
use protocol::{
    CombineExpect, DispatchExpect, DispatchMeta, Entry, ErrorCode, FrameGeometry, FrameId,
    ModelShape, Response, ResponseScratch, ServerTimes, TokenRef, WireDtype, decode_response,
    encode_dispatch,
};

use super::{PATIENCE, Reference, Request};

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    pub rows: Result<Vec<f32>, (ErrorCode, String)>,
    pub times: ServerTimes,
}

/// A plain client of one server: frames out, frames in, in order.
pub struct TestClient<E: Transport> {
    pub channel: Channel<E>,
    pub geometry: FrameGeometry,
    shape: ModelShape,
    client_id: u64,
    generation: u32,
    sequence: u64,
    scratch: ResponseScratch,
    wait: WaitSet,
}

impl<E: Transport> TestClient<E> {
    pub fn new(
        channel: Channel<E>,
        shape: ModelShape,
        client_id: u64,
        generation: u32,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> Self {
        let geometry = FrameGeometry::new(
            channel.layout().frame_bytes(),
            shape.hidden as usize,
            dtype,
            response_dtype,
            shape.top_k as usize,
        )
        .expect("a token fits");
        let wait = WaitSet::new().expect("a wait set");
        wait.attach(channel.endpoint()).expect("the channel can be waited for");
        Self {
            channel,
            geometry,
            shape,
            client_id,
            generation,
            sequence: 0,
            scratch: ResponseScratch::default(),
            wait,
        }
    }

    /// The properties that a server must require of this client's frames.
    pub fn expected_by_server(&self) -> DispatchExpect {
        DispatchExpect {
            client_id: self.client_id,
            generation: self.generation,
            hidden: self.geometry.hidden(),
            num_layers: self.shape.num_layers,
            num_experts: self.shape.num_experts,
            max_tokens: self.geometry.max_tokens(),
            top_k: self.geometry.top_k(),
            dtype: self.geometry.dtype(),
            response_dtype: self.geometry.response_dtype(),
        }
    }

    pub fn dtypes(&self) -> (WireDtype, WireDtype) {
        (self.geometry.dtype(), self.geometry.response_dtype())
    }

    /// Writes `request` into `frame` without publishing it. Returns its sequence and its bytes.
    pub fn write(&mut self, frame: &TxFrame, request: &Request) -> (u64, usize) {
        let sequence = self.sequence;
        self.sequence += 1;
        let meta = DispatchMeta {
            id: FrameId {
                epoch: 1,
                client_id: self.client_id,
                generation: self.generation,
                sequence,
                layer: request.layer,
                frame_idx: 0,
                num_frames: 1,
            },
            hidden: self.geometry.hidden(),
            dtype: self.geometry.dtype(),
            response_dtype: self.geometry.response_dtype(),
            payload_checksum: sequence.is_multiple_of(2),
        };
        let (mut tokens, mut entries) = (Vec::new(), Vec::new());
        for (token, routes) in request.routes.iter().enumerate() {
            let (entry_begin, entry_count) = (entries.len() as u32, routes.len() as u32);
            tokens.push(TokenRef { token: token as u32, entry_begin, entry_count });
            entries.extend(routes.iter().map(|&(expert, weight)| Entry { expert, weight }));
        }
        let mut view = self.channel.write_view(frame);
        let used_bytes =
            encode_dispatch(&mut view, &meta, &request.x, &tokens, &entries).expect("it fits");
        (sequence, used_bytes)
    }

    /// Publishes `request` if there is credit. Returns its sequence.
    pub fn try_send(&mut self, request: &Request) -> Option<u64> {
        let frame = self.channel.try_reserve().expect("sound counters")?;
        let (sequence, used_bytes) = self.write(&frame, request);
        self.channel.publish(frame, used_bytes).expect("published");
        Some(sequence)
    }

    /// Publishes `request` once there is credit.
    pub fn send(&mut self, request: &Request) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(sequence) = self.try_send(request) {
                return sequence;
            }
            let Self { channel, wait, .. } = self;
            let news = wait_until(
                wait,
                SpinPolicy::default(),
                deadline,
                || channel.has_news().then_some(()),
                |on| if on { channel.arm() } else { channel.disarm() },
            );
            assert!(news.expect("waiting works").is_some(), "no credit in time");
            if self.channel.has_frame() {
                // The wait cannot tell credit from an answer. The sleep avoids spinning on the answer.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Waits for the answer to the request with `sequence` and checks that it is the next one.
    pub fn receive(&mut self, sequence: u64, request: &Request) -> Reply {
        self.receive_within(sequence, request, PATIENCE).expect("an answer in time")
    }

    /// Like [`receive`](Self::receive), or `None` without an answer within `bound`.
    pub fn receive_within(
        &mut self,
        sequence: u64,
        request: &Request,
        bound: Duration,
    ) -> Option<Reply> {
        let Self { channel, wait, .. } = self;
        let arrived = wait_until(
            wait,
            SpinPolicy::default(),
            Instant::now() + bound,
            || channel.has_frame().then_some(()),
            |on| if on { channel.arm() } else { channel.disarm() },
        );
        arrived.expect("waiting works")?;
        let frame = self.channel.try_next().expect("sound counters").expect("a frame");
        let expect = CombineExpect {
            client_id: self.client_id,
            generation: self.generation,
            sequence,
            layer: request.layer,
            frame_idx: 0,
            num_tokens: request.routes.len(),
            hidden: self.geometry.hidden(),
            dtype: self.geometry.response_dtype(),
        };
        let view = self.channel.view(&frame);
        let reply = match decode_response(view, &expect, &mut self.scratch) {
            Ok(Response::Rows(mut rows)) => {
                let num_rows = rows.num_rows();
                // Poison shows values that are not written.
                let mut out = vec![f32::NAN; num_rows * rows.hidden()];
                rows.read_rows_f32(0..num_rows, &mut out).expect("rows are sound");
                Reply { times: rows.server_times(), rows: Ok(out) }
            }
            Ok(Response::Error(error)) => Reply {
                rows: Err((error.code, error.message.to_owned())),
                times: ServerTimes::default(),
            },
            Err(error) => panic!("a response that is not sound: {error}"),
        };
        self.channel.release().expect("released");
        Some(reply)
    }

    /// Sends `request`, waits for its answer and checks it.
    pub fn round_trip(&mut self, request: &Request, reference: &Reference) -> ServerTimes {
        let sequence = self.send(request);
        let reply = self.receive(sequence, request);
        let (dtype, response_dtype) = self.dtypes();
        reference.check(request, dtype, response_dtype, &reply.rows.expect("rows"));
        reply.times
    }
}
