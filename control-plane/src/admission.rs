//! Reasons to refuse a request, and the checks of members' requests. Sans-I/O.

use control_api::placement::{cannot_be_reached, is_host_port, validate_model};
use control_api::text::is_disruptive;
use control_api::{Assignment, FleetGoals, LoadReport, ModelDescriptor, RegisterRequest};
use trust::tls::is_valid_name;

use crate::planner::PlanError;
use crate::planner::rebalance::MAX_SPARE;

/// Reason to refuse a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("no member has the id {member}: register again")]
    UnknownMember { member: String },
    #[error("the lease of member {name} expired {ago_ms} ms ago: register again")]
    LeaseExpired { name: String, ago_ms: u64 },
    #[error(
        "another process has registered as {name} and replaced this one: names must be unique in the \
         fleet"
    )]
    Superseded { name: String },
    #[error(
        "the name {name} is in use by a live process at {data_addr}: give each server a name of its \
         own, or stop one of the two"
    )]
    NameInUse { name: String, data_addr: String },
    #[error(
        "the name {name} belongs to a server with another identity: use another name, or let an operator remove that \
         member first"
    )]
    NameBound { name: String },
    #[error(
        "member {name} has {} than this fleet: its fingerprint is {found}, the fleet's is \
         {expected}; start the member with the fleet's checkpoint, or add the model with `switchyard model \
         add {found}` to update the fleet",
        if *is_same_shape { "other weights" } else { "another model" }
    )]
    ModelMismatch { name: String, found: String, expected: String, is_same_shape: bool },
    #[error(
        "{refusal}; all servers of the fleet's model are dead: it gives way once no client follows it any more, or \
         {retention_s} s after its last server"
    )]
    DeadModel { refusal: String, retention_s: u64 },
    #[error(
        "member {name} has the model {fingerprint}, whose servers are being drained: start it with the fleet's current \
         checkpoint"
    )]
    ModelLeaves { name: String, fingerprint: String },
    #[error(
        "member {name} describes the model {fingerprint} differently from the members before it: \
         its configuration must be the same file"
    )]
    DescriptorMismatch { name: String, fingerprint: String },
    #[error(
        "the placement of this control plane is fixed: start it with --placement load to change goals while it runs"
    )]
    FixedPlacement,
    #[error(
        "the digests of all bytes of a member's weights differ from those that another member of this fleet has \
         sent: one of the two has damaged or changed files"
    )]
    BytesMismatch,
    #[error("{0}")]
    Capacity(#[from] PlanError),
    #[error("the fleet has {limit} members, the most that this control plane accepts")]
    TooManyMembers { limit: usize },
    #[error(
        "this identity has {share} members, the most that one may have: give servers tokens or certificates of their own"
    )]
    TooManyOfOwner { share: usize },
    #[error("{0}")]
    BadRequest(String),
}

/// Checks a registration. `model` is the fleet's model, once a member has registered;
/// `pinned_fingerprint` is the only accepted fingerprint, if one is set.
pub(crate) fn check_registration(
    request: &RegisterRequest,
    model: Option<&ModelDescriptor>,
    pinned_fingerprint: Option<&str>,
) -> Result<(), Refusal> {
    let bad = |text: String| Err(Refusal::BadRequest(text));
    let name = &request.name;
    // Operators pass names to commands, where a dash would begin an option.
    if !is_valid_name(name) {
        let found = clip(name);
        return bad(format!(
            "member name {found:?}: expected 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit"
        ));
    }
    let metrics_addr = request.metrics_addr.iter().map(|addr| ("metrics_addr", addr));
    let weights_addr = request.weights_addr.iter().map(|addr| ("weights_addr", addr));
    for (field, addr) in metrics_addr.chain(weights_addr).chain([("data_addr", &request.data_addr)])
    {
        if !is_host_port(addr) {
            let found = clip(addr);
            return bad(format!(
                "{field} {found:?} of member {name}: expected host:port with a port above 0"
            ));
        }
    }
    if let Some(zone) = &request.zone
        && (zone.is_empty()
            || zone.len() > 128
            || !zone.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        let found = clip(zone);
        return bad(format!(
            "zone {found:?} of member {name}: expected 1 to 128 visible ASCII characters"
        ));
    }
    if cannot_be_reached(&request.data_addr) {
        let found = &request.data_addr;
        return bad(format!(
            "data_addr {found} of member {name}: no client can connect to it; advertise an address of the \
             member's host"
        ));
    }
    if let Err(err) = validate_model(&request.model) {
        return bad(format!("model of member {name}: {err}"));
    }
    let found = request.model.fingerprint.as_str();
    let expected = pinned_fingerprint.or(model.map(|model| model.fingerprint.as_str()));
    if let Some(expected) = expected.filter(|&expected| expected != found) {
        return Err(Refusal::ModelMismatch {
            name: name.clone(),
            found: found.to_owned(),
            expected: expected.to_owned(),
            is_same_shape: model.is_some_and(|model| {
                let fingerprint = request.model.fingerprint.clone();
                request.model == ModelDescriptor { fingerprint, ..model.clone() }
            }),
        });
    }
    if model.is_some_and(|model| *model != request.model) {
        let fingerprint = found.to_owned();
        return Err(Refusal::DescriptorMismatch { name: name.clone(), fingerprint });
    }
    check_assignment(&request.holds, &request.model)
}

/// Checks that an assignment is sorted and within the model.
pub(crate) fn check_assignment(found: &Assignment, model: &ModelDescriptor) -> Result<(), Refusal> {
    check_experts("holds", found, model)
}

fn check_experts(field: &str, found: &Assignment, model: &ModelDescriptor) -> Result<(), Refusal> {
    let bad = |text: String| Err(Refusal::BadRequest(text));
    if !found.layers.is_sorted_by(|a, b| a.layer < b.layer) {
        return bad(format!("{field}: layers must be strictly ascending"));
    }
    for entry in &found.layers {
        let layer = entry.layer;
        if model.moe_layers.binary_search(&layer).is_err() {
            return bad(format!("{field}: the model has no MoE layer {layer}"));
        }
        if !entry.experts.is_sorted_by(|a, b| a < b) {
            return bad(format!("{field}: experts of layer {layer} must be strictly ascending"));
        }
        if let Some(&last) = entry.experts.last()
            && last >= model.num_experts
        {
            let num_experts = model.num_experts;
            return bad(format!(
                "{field}: expert {last} of layer {layer}, the model has {num_experts} experts"
            ));
        }
    }
    Ok(())
}

/// Checks that goals are in range.
pub(crate) fn check_goals(goals: &FleetGoals) -> Result<(), Refusal> {
    let FleetGoals { replicas, spare } = *goals;
    if !(1..=MAX_REPLICAS).contains(&replicas) {
        let text = format!("replicas {replicas}: expected 1 to {MAX_REPLICAS}");
        return Err(Refusal::BadRequest(text));
    }
    if !(0.0..=MAX_SPARE).contains(&spare) {
        return Err(Refusal::BadRequest(format!("spare {spare}: expected 0 to {MAX_SPARE}")));
    }
    Ok(())
}

/// Checks the size and the texts of a load report, which stays in memory and is shown to people.
pub(crate) fn check_load(
    load: &LoadReport,
    model: Option<&ModelDescriptor>,
) -> Result<(), Refusal> {
    let bad = |text: String| Err(Refusal::BadRequest(text));
    match model {
        Some(model) => check_experts("load: unreadable", &load.unreadable, model)?,
        None if load.unreadable.is_empty() => {}
        None => return bad("load: unreadable experts of no model".to_owned()),
    }
    let most = model.map_or(0, |model| model.num_experts as usize * model.moe_layers.len());
    if load.experts.len() > most {
        let found = load.experts.len();
        return bad(format!("load: {found} experts, the model has {most}"));
    }
    if load.links.len() > MAX_TRANSPORTS {
        let found = load.links.len();
        return bad(format!("load: {found} transports, expected at most {MAX_TRANSPORTS}"));
    }
    let notes = load.links.iter().flat_map(|links| &links.left_out);
    if notes.clone().count() > MAX_NOTES {
        return bad(format!("load: more than {MAX_NOTES} reasons"));
    }
    let names = load.links.iter().map(|links| &links.transport);
    for text in names.chain(notes).chain(&load.device) {
        if text.len() > MAX_TEXT_BYTES || text.contains(is_disruptive) {
            let found = clip(text);
            return bad(format!(
                "load: text {found:?}: expected at most {MAX_TEXT_BYTES} bytes without characters that control a terminal or the direction of text"
            ));
        }
    }
    Ok(())
}

const MAX_REPLICAS: u32 = 64;
const MAX_TRANSPORTS: usize = 32;
const MAX_NOTES: usize = 128;
const MAX_TEXT_BYTES: usize = 512;

fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}
