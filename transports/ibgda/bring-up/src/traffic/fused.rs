//! The stage `fused`: layers of the fused kernels. The GPU posts their requests on queues of its own. Each side is
//! at once a client of the other and its server.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ibgda::{Access, Nic, OpenPeer, Peer, PeerConfig, QueueConfig};
use kernels::abi::{FLAG_ANY_PATH, FrameGeometry};
use kernels::gpu::{Gpu, Stream};

use super::{MEET_PATIENCE, Session};
use crate::in_use::{InUse, Launches};
use crate::layer::{Client, Direct, GENERATION, HIDDEN, Input, MAX_TOKENS, Run, Server, geometry};
use crate::report::whole_text;
use crate::stage::Stage;

/// Requirements of the stage besides joined queues of the processor.
pub(crate) struct Fused {
    pub(crate) nic: Arc<Nic>,
    pub(crate) gpu: Gpu,
    /// The GPU posts.
    pub(crate) access: Arc<dyn Access>,
    pub(crate) queue: QueueConfig,
    /// Text for the place of queues.
    pub(crate) place: &'static str,
}

/// The queues to the peer, once as its client and once as its server.
struct Ends {
    to_server: Peer,
    to_client: Peer,
}

/// Objects that kernels use.
struct Parts {
    ends: Option<Ends>,
    client: Client,
    server: Server,
}

impl Launches for Parts {
    fn streams(&self) -> [&Stream; 2] {
        [self.client.stream(), self.server.stream()]
    }
}

impl Session {
    /// Why the stage cannot run, if it cannot.
    pub(crate) fn lacks_fused(&self) -> Option<&'static str> {
        if self.fused.is_none() {
            Some("no --gpu on this side")
        } else if !self.theirs.has_gpu {
            Some("no --gpu on the peer's side")
        } else {
            None
        }
    }

    pub(super) fn run_fused(&mut self) -> Result<String> {
        let fused = self.fused.take().ok_or_else(|| anyhow!("there is no GPU: give `--gpu`"))?;
        let geometry = geometry()?;
        let inputs: Vec<Input> = NUM_TOKENS
            .iter()
            .zip(4000..)
            .map(|(num_tokens, salt)| Input::new(self.own.seed, salt, *num_tokens))
            .collect();
        // Before the peer waits for anything: by stores, on this side alone.
        let mut direct = Direct::new(&fused.gpu, geometry, self.id(true))?;
        let expected = inputs.iter().map(|input| direct.layer(input, self.timeout));
        let expected = expected.collect::<Result<Vec<_>>>().context("over stores")?;
        drop(direct);

        let client = Client::new(&fused.gpu, geometry, self.id(true))?;
        let server = Server::new(&fused.gpu, geometry)?;
        let ends = Some(self.open_fused(&fused, &geometry)?);
        let mut parts = InUse::new(Parts { ends, client, server });
        let Parts { ends, client, server } = &mut *parts;
        let Some(Ends { to_server, to_client }) = ends else { bail!("there are no queues") };
        let (as_client, as_server) = (client.waits(self.timeout), server.waits(self.timeout));
        client.set_server(to_server.server(&geometry, GENERATION, as_client)?)?;
        let id = self.id(false);
        server.set_client(to_client.client(&geometry, id, GENERATION, as_server)?)?;
        let qpn = to_server.queues()[0].qpn();
        if self.stall_at == Some(Stage::Fused) {
            softnic_verbs::stall(qpn)?;
        }
        if self.fail_at == Some(Stage::Fused) {
            softnic_verbs::fail(qpn, 0, softnic_verbs::Syndrome::RemoteOp)?;
        }
        let run = Run { flags: FLAG_ANY_PATH, timeout: self.timeout };
        for (round, (input, expected)) in inputs.iter().zip(&expected).enumerate() {
            if round + NUM_AFTER_RESET == inputs.len() {
                // The same queue pairs, and so the same tables. Every launch was waited for.
                *ends = ends.take().map(|ends| self.reset_fused(ends)).transpose()?;
            }
            // No side posts before both are ready to receive.
            self.meet()?;
            let what = || format!("layer {round}, {} tokens", NUM_TOKENS[round]);
            client.dispatch(input, run).with_context(what)?;
            self.meet()?;
            server.serve(round as u64 + 1, round % 2 == 1, run).with_context(what)?;
            if let Err(error) = self.meet() {
                // The queues tell whether the peer missed data that this side sent.
                return Err(match client.combine(input, run).with_context(what) {
                    Err(own) => error.context(format!("on this side: {}", whole_text(&own))),
                    Ok(_) => error,
                });
            }
            let found = client.combine(input, run).with_context(what)?;
            let differs =
                found.iter().zip(expected).position(|(found, expected)| found != expected);
            if let Some(at) = differs {
                let (token, value) = (at / HIDDEN as usize, at % HIDDEN as usize);
                let (found, expected) = (found[at], expected[at]);
                return Err(anyhow!(
                    "value {value} of token {token} is {found:#06x}, expected {expected:#06x} as by stores"
                ))
                .with_context(what);
            }
            ensure!(found.len() == expected.len(), "{} values came", found.len());
        }
        self.meet()?;
        Ok(format!(
            "{} layers of up to {MAX_TOKENS} tokens of {HIDDEN} values posted by {} on {} queues in each direction in {}, {NUM_AFTER_RESET} of them after a reset: bit for bit as by stores",
            inputs.len(),
            fused.gpu.name(),
            self.own.num_queues,
            fused.place,
        ))
    }

    /// Queues of the client on this side, or on the peer's.
    fn id(&self, is_own: bool) -> u64 {
        if self.own.is_connector == is_own { 1 } else { 2 }
    }

    fn open_fused(&mut self, fused: &Fused, geometry: &FrameGeometry) -> Result<Ends> {
        let request = usize::try_from(geometry.slot_bytes)?;
        let response = usize::try_from(geometry.response_slot_bytes)?;
        let open = |own_slot_bytes, peer_slot_bytes| {
            let (num_queues, queue) = (self.own.num_queues as usize, fused.queue);
            let config = PeerConfig { peer: 0, num_queues, queue, own_slot_bytes, peer_slot_bytes };
            OpenPeer::open(&fused.nic, &fused.access, config)
        };
        let (to_server, to_client) = (open(response, request)?, open(request, response)?);
        let [their_client, their_server] =
            self.describe_fused([to_server.description(), to_client.description()])?;
        let to_server = to_server.join(&their_server)?;
        let to_client = to_client.join(&their_client)?;
        for (peer, bytes) in [(&to_server, request), (&to_client, response)] {
            // Kernels have stored all data that arrives.
            peer.mirror().write(0, &vec![0xee; bytes])?;
        }
        Ok(Ends { to_server, to_client })
    }

    fn reset_fused(&mut self, ends: Ends) -> Result<Ends> {
        // The peer's last answer has come, so only completions of its requests are still under way.
        self.meet()?;
        let (to_server, to_client) = (ends.to_server.reset()?, ends.to_client.reset()?);
        self.meet()?;
        let [their_client, their_server] =
            self.describe_fused([to_server.description(), to_client.description()])?;
        let to_server = to_server.rejoin(&their_server)?;
        let to_client = to_client.rejoin(&their_client)?;
        Ok(Ends { to_server, to_client })
    }

    /// Sends the descriptions of this side's client and server queues, and gets the peer's.
    fn describe_fused(&mut self, own: [Vec<u8>; 2]) -> Result<[Vec<u8>; 2]> {
        let patience = self.timeout * MEET_PATIENCE;
        let [client, server] = own;
        let client = self.channel.describe(&client, patience)?;
        Ok([client, self.channel.describe(&server, patience)?])
    }
}

/// Tokens of each layer: an empty layer, a single token, and reused places in the ring of frames.
const NUM_TOKENS: [u32; 6] = [MAX_TOKENS, 5, 0, MAX_TOKENS, 1, MAX_TOKENS];
/// Layers behind the reset.
const NUM_AFTER_RESET: usize = 2;
