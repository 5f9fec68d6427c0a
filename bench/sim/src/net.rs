//! The simulation of an experiment.

use bench_harness::stats::of_sorted;
use message_engine::credit::{
    Admission, Credit, CreditConfig, CreditReceiver, Event as Credited, GrantOrder,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::event::{Event, Events, Kind, Packet};
use crate::host::{Flow, FlowCredit, Host, submit};
use crate::switch::Switch;
use crate::{Control, Message, Model, Outcome, Scenario, SimError, Totals, Traffic, Verb};

/// Runs one experiment.
///
/// # Errors
/// [`SimError`].
pub fn run(scenario: Scenario, model: &Model) -> Result<Outcome, SimError> {
    range("bytes", scenario.bytes, 1 << 30, "1 to 1 GiB")?;
    let Scenario { senders, receivers, bytes, control, verb, seed } = scenario;
    range("senders", senders as u64, MAX_HOSTS, "1 to 1024")?;
    range("receivers", receivers as u64, MAX_HOSTS, "1 to 1024")?;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut messages = Vec::with_capacity(senders * receivers);
    // Each initiator begins with another peer.
    let (beginners, others) = match verb {
        Verb::Write => (senders, receivers),
        Verb::Read => (receivers, senders),
    };
    for beginner in 0..beginners {
        let start_ps = rng.random_range(0..=model.jitter_ns * 1_000);
        let order = (0..others).map(|nth| (beginner + nth) % others);
        messages.extend(order.map(|other| {
            let (from, to) = match verb {
                Verb::Write => (beginner, other),
                Verb::Read => (other, beginner),
            };
            Message { from, to, bytes, start_ps }
        }));
    }
    let totals = run_messages(&Traffic { senders, receivers, messages, control, verb }, model)?;
    let payload = bytes * senders as u64;
    Ok(Outcome {
        scenario,
        ms: totals.ms,
        median_message_ms: totals.median_message_ms,
        gb_per_s_per_receiver: payload as f64 / totals.ms / 1e6,
        dropped_packets: totals.dropped_packets,
        resent_bytes: totals.resent_bytes,
        timeouts: totals.timeouts,
        pauses: totals.pauses,
        max_queue_bytes: totals.max_queue_bytes,
        control_packets: totals.control_packets,
    })
}

/// Sends messages of any sizes between any hosts.
///
/// # Errors
/// [`SimError`].
pub fn run_messages(traffic: &Traffic, model: &Model) -> Result<Totals, SimError> {
    range("senders", traffic.senders as u64, MAX_HOSTS, "1 to 1024")?;
    range("receivers", traffic.receivers as u64, MAX_HOSTS, "1 to 1024")?;
    range("messages", traffic.messages.len() as u64, 1 << 20, "1 to 1,048,576")?;
    for message in &traffic.messages {
        range("bytes", message.bytes, 1 << 30, "1 to 1 GiB")?;
        let (from, to) = (message.from as u64 + 1, message.to as u64 + 1);
        range("sender", from, traffic.senders as u64, "one of the senders")?;
        range("receiver", to, traffic.receivers as u64, "one of the receivers")?;
    }
    Net::new(traffic, model)?.run()
}

fn range(what: &'static str, found: u64, max: u64, expected: &'static str) -> Result<(), SimError> {
    if (1..=max).contains(&found) {
        Ok(())
    } else {
        Err(SimError::Scenario { what, found, expected })
    }
}

struct Net<'a> {
    control: Control,
    model: &'a Model,
    events: Events,
    hosts: Vec<Host>,
    switch: Switch,
    flows: Vec<Flow>,
    left: usize,
    timeouts: u64,
}

impl<'a> Net<'a> {
    fn new(traffic: &Traffic, model: &'a Model) -> Result<Self, SimError> {
        let (senders, num_hosts) = (traffic.senders, traffic.senders + traffic.receivers);
        let mut hosts: Vec<Host> = (0..num_hosts).map(|_| Host::default()).collect();
        let credit_config = credit_config(traffic, model);
        if let Some(config) = credit_config {
            for host in &mut hosts[senders..] {
                host.receiver = Some(CreditReceiver::new(config)?);
            }
        }
        let mut flows = Vec::with_capacity(traffic.messages.len());
        let mut events = Events::default();
        for (idx, message) in traffic.messages.iter().enumerate() {
            let host = &mut hosts[senders + message.to];
            let credit = match (&mut host.receiver, &credit_config) {
                (Some(receiver), Some(config)) => {
                    let id = receiver.join()?;
                    host.flow_of.resize(host.flow_of.len().max(id.index() + 1), 0);
                    host.flow_of[id.index()] = idx as u32;
                    Some(FlowCredit::new(config, traffic.verb, id))
                }
                _ => None,
            };
            let ends = (message.from as u16, (senders + message.to) as u16);
            flows.push(Flow::new(ends, message.bytes, traffic.verb, credit));
            events.after(message.start_ps, Event::Start(idx as u32));
        }
        let (switch, left) = (Switch::new(num_hosts), flows.len());
        let control = traffic.control;
        Ok(Self { control, model, events, hosts, switch, flows, left, timeouts: 0 })
    }

    fn run(mut self) -> Result<Totals, SimError> {
        while self.left > 0 {
            let Some(event) = self.events.next() else {
                return Err(SimError::Stuck { ns: self.events.now_ps / 1_000, left: self.left });
            };
            self.handle(event)?;
        }
        let mut done: Vec<u64> = self.flows.iter().filter_map(|flow| flow.done_ps).collect();
        done.sort_unstable();
        let landed = self.flows.iter().filter_map(|flow| flow.landed_ps).max();
        Ok(Totals {
            ms: self.events.now_ps as f64 / 1e9,
            landed_ms: landed.unwrap_or(self.events.now_ps) as f64 / 1e9,
            median_message_ms: of_sorted(&done, 0.5).map_or(0.0, |ps| ps as f64 / 1e9),
            dropped_packets: self.switch.dropped_packets,
            resent_bytes: self.hosts.iter().map(|host| host.resent_bytes).sum(),
            timeouts: self.timeouts,
            pauses: self.switch.pauses,
            max_queue_bytes: self.switch.max_queue_bytes,
            control_packets: self.hosts.iter().map(|host| host.control_packets).sum(),
        })
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        let Self { model, events, hosts, switch, flows, .. } = self;
        match event {
            Event::Start(idx) if flows[idx as usize].verb == Verb::Read => self.begin_read(idx)?,
            Event::Start(idx) => {
                let from = flows[idx as usize].from;
                match submit(&mut flows[idx as usize])? {
                    Some(demand) => self.send_control(from, idx, demand)?,
                    None => hosts[from as usize].activate(idx, flows, model, events)?,
                }
            }
            Event::HostLink(host) => hosts[host as usize].send(flows, model, events)?,
            Event::InSwitch(packet) => {
                switch.take(packet, self.control, model, events);
            }
            Event::Output(port) => switch.forward(port, model, events),
            Event::AtHost(packet) => match packet.kind {
                Kind::Demand(_) | Kind::Credit(_) => {
                    events.after(model.control_ns * 1_000, Event::Control(packet));
                }
                Kind::Data { offset, len } => self.on_data(packet.flow, offset, len)?,
                Kind::Ack(offset) => self.on_ack(packet.flow, offset),
                // The NIC answers by itself.
                Kind::Request(offset) => {
                    flows[packet.flow as usize].requested = offset;
                    hosts[packet.to as usize].activate(packet.flow, flows, model, events)?;
                }
                Kind::Nak(offset) => {
                    self.on_ack(packet.flow, offset);
                    self.go_back(packet.flow, offset)?;
                }
            },
            Event::Control(packet) => self.on_control(packet)?,
            Event::Post(idx, credit) => self.post_read(idx, credit)?,
            Event::Pause(host, stopped) => {
                hosts[host as usize].stopped = stopped;
                hosts[host as usize].kick(flows, model, events)?;
            }
            Event::Retry { flow: idx, seen } => {
                // A real receiver confirms every packet, so that its sender knows `expected`.
                let flow = &flows[idx as usize];
                if flow.expected < flow.next && flow.next == flow.furthest {
                    if flow.expected == seen {
                        self.timeouts += 1;
                        self.go_back(idx, seen)?;
                    } else {
                        let retry = Event::Retry { flow: idx, seen: flow.expected };
                        events.after(model.retry_ns * 1_000, retry);
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins a read. With credits, the receiver submits the demand to itself.
    fn begin_read(&mut self, idx: u32) -> Result<(), SimError> {
        let flow = &mut self.flows[idx as usize];
        let (host, bytes) = (flow.to, flow.bytes);
        let Some(credit) = &mut flow.credit else {
            return self.send_control(host, idx, Kind::Request(bytes));
        };
        let Admission::Scheduled(demand) = credit.sender.submit(bytes)? else { return Ok(()) };
        let now_ns = self.events.now_ps / 1_000;
        if let Some(receiver) = &mut self.hosts[host as usize].receiver {
            receiver.handle(now_ns, credit.id, Credited::Demand(demand))?;
        }
        self.send_credits(host)
    }

    fn post_read(&mut self, idx: u32, grant: Credit) -> Result<(), SimError> {
        let flow = &mut self.flows[idx as usize];
        let Some(credit) = &mut flow.credit else { return Ok(()) };
        credit.sender.on_credit(Credit { unscheduled: 0, ..grant })?;
        let allowance = credit.sender.allowance();
        credit.sender.sent(allowance)?;
        let (host, upto) = (flow.to, grant.granted);
        if allowance == 0 { Ok(()) } else { self.send_control(host, idx, Kind::Request(upto)) }
    }

    fn on_data(&mut self, idx: u32, offset: u64, len: u32) -> Result<(), SimError> {
        let flow = &mut self.flows[idx as usize];
        let (host, is_read) = (flow.to, flow.verb == Verb::Read);
        let answer = if offset == flow.expected {
            let before = flow.expected / ACK_EVERY_BYTES;
            flow.expected += u64::from(len);
            flow.asked = false;
            if flow.expected == flow.bytes {
                flow.landed_ps = Some(self.events.now_ps);
            }
            let due = flow.expected == flow.bytes || flow.expected / ACK_EVERY_BYTES > before;
            due.then_some(Kind::Ack(flow.expected))
        } else if offset > flow.expected {
            let ask = !std::mem::replace(&mut flow.asked, true);
            ask.then_some(Kind::Nak(flow.expected))
        } else {
            let last = offset + u64::from(len) == flow.bytes;
            last.then_some(Kind::Ack(flow.expected))
        };
        if let (Some(credit), Some(receiver)) =
            (&flow.credit, &mut self.hosts[host as usize].receiver)
            && !credit.free
        {
            let now_ns = self.events.now_ps / 1_000;
            receiver.handle(now_ns, credit.id, Credited::Received(flow.expected))?;
            self.send_credits(host)?;
        }
        match answer {
            // A reader sends no acknowledgement.
            Some(Kind::Ack(offset)) if is_read => {
                self.on_ack(idx, offset);
                Ok(())
            }
            Some(kind) => self.send_control(host, idx, kind),
            None => Ok(()),
        }
    }

    fn on_ack(&mut self, idx: u32, offset: u64) {
        let flow = &mut self.flows[idx as usize];
        flow.acked = flow.acked.max(offset);
        if flow.acked == flow.bytes && flow.done_ps.is_none() {
            flow.done_ps = Some(self.events.now_ps);
            self.left -= 1;
        }
    }

    fn go_back(&mut self, idx: u32, offset: u64) -> Result<(), SimError> {
        let flow = &mut self.flows[idx as usize];
        flow.next = flow.next.min(offset.max(flow.acked));
        let host = &mut self.hosts[flow.from as usize];
        Ok(host.activate(idx, &mut self.flows, self.model, &mut self.events)?)
    }

    fn on_control(&mut self, packet: Packet) -> Result<(), SimError> {
        let Some(credit) = &mut self.flows[packet.flow as usize].credit else { return Ok(()) };
        match packet.kind {
            Kind::Demand(demand) => {
                let (id, now_ns) = (credit.id, self.events.now_ps / 1_000);
                if let Some(receiver) = &mut self.hosts[packet.to as usize].receiver {
                    receiver.handle(now_ns, id, Credited::Demand(demand))?;
                }
                self.send_credits(packet.to)
            }
            Kind::Credit(grant) => {
                credit.sender.on_credit(grant)?;
                let host = &mut self.hosts[packet.to as usize];
                Ok(host.activate(packet.flow, &mut self.flows, self.model, &mut self.events)?)
            }
            _ => Ok(()),
        }
    }

    fn send_credits(&mut self, host: u16) -> Result<(), SimError> {
        let credits = self.hosts[host as usize].credits();
        for (idx, credit) in credits {
            match self.flows[idx as usize].verb {
                Verb::Write => self.send_control(host, idx, Kind::Credit(credit))?,
                Verb::Read => {
                    self.events.after(self.model.control_ns * 1_000, Event::Post(idx, credit));
                }
            }
        }
        Ok(())
    }

    /// Sends a control packet about message `idx` from `host` to the other end.
    fn send_control(&mut self, host: u16, idx: u32, kind: Kind) -> Result<(), SimError> {
        let flow = &self.flows[idx as usize];
        let to = if host == flow.from { flow.to } else { flow.from };
        let bytes = self.model.control_bytes;
        let packet = Packet { flow: idx, from: host, to, bytes, kind };
        let host = &mut self.hosts[host as usize];
        Ok(host.send_control(packet, &mut self.flows, self.model, &mut self.events)?)
    }
}

fn credit_config(traffic: &Traffic, model: &Model) -> Option<CreditConfig> {
    let (order, times) = match traffic.control {
        Control::Credits => (GrantOrder::RoundRobin, model.overcommit),
        Control::CreditsShortest => (GrantOrder::ShortestFirst, model.overcommit_shortest),
        Control::Loss | Control::Pause => return None,
    };
    let mut num_senders = vec![0; traffic.receivers];
    for message in &traffic.messages {
        num_senders[message.to] += 1;
    }
    let most = num_senders.into_iter().max().unwrap_or(1);
    let bytes_per_s = 1_000_000_000_000 / model.ps_per_byte;
    let config = CreditConfig::for_link(bytes_per_s, model.round_trip_ns()).overcommitted(times);
    Some(CreditConfig { order, max_senders: most, ..config })
}

/// 64 full packets.
const ACK_EVERY_BYTES: u64 = 256 << 10;
/// Limit by the type of host numbers, and by memory.
const MAX_HOSTS: u64 = 1024;
