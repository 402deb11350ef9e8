//! The traits that describe an operator. The part of a plan that is the same for all operators is in
//! [`Plan`](super::Plan).

use crate::cpu::{Isa, resolve_threads};

use crate::verification::Comparison;
use crate::{Device, Error, PlanOptions, Result, TensorDesc, TensorMut, TensorRef, Workspace};
use std::fmt::{Debug, Display};
use std::str::FromStr;

use super::{Plan, PlanInputs};

/// The maximum number of tensors that an operator reads.
pub const MAX_INPUTS: usize = 14;

/// Views of the inputs of a run, in the order of [`Operator::INPUTS`]; `None` for an input that is not given.
pub type Views<'a> = [Option<&'a TensorRef<'a>>; MAX_INPUTS];

/// The [`Views`] of these inputs, padded with `None`.
pub(crate) fn views<'a, const N: usize>(given: [Option<&'a TensorRef<'a>>; N]) -> Views<'a> {
    std::array::from_fn(|i| given.get(i).copied().flatten())
}

/// A tensor that an operator reads.
pub struct Input<S> {
    /// The name in specs, arguments and errors.
    pub name: &'static str,
    /// Its descriptor in a spec; `None` if the spec has none.
    pub desc: fn(&S) -> Option<&TensorDesc>,
}

/// Defines `INPUTS`, `views` and `args` of an [`Operator`] whose tensors have the same names in spec and arguments. The
/// required tensors come before the `?`, the optional ones after it, in the order of the views.
macro_rules! inputs {
    ($spec:ident, $args:ident: $($always:ident),*; ? $($optional:ident),*) => {
        const INPUTS: &'static [$crate::plan::Input<$spec>] = &[
            $($crate::plan::Input { name: stringify!($always), desc: |spec| Some(&spec.$always) },)*
            $($crate::plan::Input {
                name: stringify!($optional),
                desc: |spec| spec.$optional.as_ref(),
            },)*
        ];

        fn views<'a>(args: &'a $args<'_>) -> $crate::plan::Views<'a> {
            $crate::plan::views([$(Some(&args.$always),)* $(args.$optional.as_ref(),)*])
        }

        fn args<'a>(views: &[Option<$crate::TensorRef<'a>>]) -> $args<'a> {
            let mut views = views.iter().copied();
            let mut next = || views.next().flatten();
            $args {
                $($always: next().expect(concat!("every spec has ", stringify!($always))),)*
                $($optional: next(),)*
            }
        }
    };
}

pub(crate) use inputs;

/// An operator: its inputs, its configurations, and the engines that compute it.
pub trait Operator: Copy + Debug + Send + Sync + Sized + 'static {
    /// The name in reports, errors and the keys of the tuning tables.
    const NAME: &'static str;
    /// The inputs of a run.
    const INPUTS: &'static [Input<Self::Spec>];
    /// The spec: what to compute.
    type Spec: Clone + Debug + Send + Sync;
    /// The sizes of a checked spec.
    type Problem: Clone + Debug + Send + Sync;
    /// An algorithm with its parameters.
    type Configuration: Configuration;
    /// The inputs of a run by name.
    type Args<'a>: Copy;
    /// The engine on the CPU.
    type Cpu: Engine<Self, Place = Isa>;
    /// The engine on GPUs.
    type Gpu: Engine<Self, Place = Device>;

    /// Checks everything that needs no data, and returns the sizes of the spec.
    fn problem(spec: &Self::Spec) -> Result<Self::Problem>;

    /// Views of the arguments, in the order of [`Operator::INPUTS`].
    fn views<'a>(args: &'a Self::Args<'_>) -> Views<'a>;

    /// The arguments made of views, in the order of [`Operator::INPUTS`]. The inputs that every spec has must be given.
    fn args<'a>(views: &[Option<TensorRef<'a>>]) -> Self::Args<'a>;

    /// The inputs that these arguments give as views. A packed filter is not a view.
    fn inputs(_: &Self::Args<'_>) -> &'static [Input<Self::Spec>] {
        Self::INPUTS
    }

    /// Checks that plans on a device have the option [`PlanOptions::batch_invariant`].
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_batch_invariant(_: &Self::Spec, _: Device) -> Result<()> {
        Ok(())
    }

    /// The configuration that was measured to be fastest for a spec. `None` if there is none; then the cost model
    /// chooses.
    fn tuned(_: &Self::Spec, _: &PlanOptions) -> Result<Option<Self::Configuration>> {
        Ok(None)
    }
}

/// The algorithm of a configuration.
pub(crate) type Algorithm<O> = <<O as Operator>::Configuration as Configuration>::Algorithm;

/// An algorithm with its parameters. The cost model chooses those that are `None`.
pub trait Configuration:
    Copy + PartialEq + Debug + Display + FromStr<Err = Error> + Send + Sync
{
    /// The algorithms of the operator.
    type Algorithm: Copy
        + PartialEq
        + Debug
        + Display
        + FromStr<Err = Error>
        + Send
        + Sync
        + 'static;

    /// The algorithm with the cost model's parameters.
    fn of(algorithm: Self::Algorithm) -> Self;

    /// The algorithm.
    fn algorithm(&self) -> Self::Algorithm;

    /// The number of CPU threads, if it is a parameter.
    fn threads(&self) -> Option<usize> {
        None
    }

    /// Rejects parameters that the algorithm does not have on the device of the options, or with which it cannot run.
    fn check(&self, options: &PlanOptions) -> Result<()>;
}

/// The spec, options and target from which an [`Engine`] is made and its algorithm is chosen.
pub struct Setup<'a, O: Operator, P> {
    /// The spec: what to compute.
    pub spec: &'a O::Spec,
    /// Its sizes.
    pub problem: &'a O::Problem,
    /// The options of the plan.
    pub options: &'a PlanOptions,
    /// The target: an instruction set of the CPU, or a GPU.
    pub place: P,
}

impl<O: Operator, P: Copy> Setup<'_, O, P> {
    /// The number of threads that may be used.
    pub(crate) fn threads(&self) -> usize {
        resolve_threads(self.options.threads)
    }

    /// Returns [`Error::Unsupported`] if `algorithm` is not in `supported`.
    pub(crate) fn require(
        &self,
        algorithm: Algorithm<O>,
        supported: &[Algorithm<O>],
    ) -> Result<()> {
        if supported.contains(&algorithm) {
            return Ok(());
        }
        Err(self.unsupported(algorithm, supported))
    }

    /// The [`Error::Unsupported`] for an algorithm that is not in `supported`.
    pub(crate) fn unsupported(&self, algorithm: Algorithm<O>, supported: &[Algorithm<O>]) -> Error {
        let names: Vec<_> = supported.iter().map(ToString::to_string).collect();
        Error::unsupported(
            format!("{} {algorithm} on {}", O::NAME, self.options.device),
            format!("this spec can be computed by {}", names.join(", ")),
        )
    }
}

/// The part of a plan that is specific to a kind of device, with the prepared kernels of the operator. It is made once
/// for a plan and run many times.
pub trait Engine<O: Operator>: Sized {
    /// The type of the target: an instruction set of the CPU, or a GPU.
    type Place: Copy;

    /// The algorithms that can compute a spec, whatever their accuracy. Without a [`choose`](Self::choose) of its own,
    /// an engine must return the fastest one first.
    fn algorithms(setup: &Setup<'_, O, Self::Place>) -> Result<Vec<Algorithm<O>>>;

    /// The algorithm that the cost model chooses.
    fn choose(setup: &Setup<'_, O, Self::Place>) -> Result<Algorithm<O>> {
        Self::algorithms(setup)?.first().copied().ok_or_else(|| {
            let what = format!("{} of this spec on {}", O::NAME, setup.options.device);
            Error::unsupported(what, "no algorithm computes it there")
        })
    }

    /// The engine with this configuration.
    fn new(setup: &Setup<'_, O, Self::Place>, configuration: &O::Configuration) -> Result<Self>;

    /// The algorithm and all of its parameters.
    fn configuration(&self) -> O::Configuration;

    /// The size in bytes of the workspace that a run needs.
    fn workspace_bytes(&self) -> usize;

    /// The part of [`Plan::explain`] after the configuration: target, block sizes, threads.
    fn explain(&self, plan: &Plan<O>) -> String;

    /// The algorithms that a search may try: those that the spec's accuracy allows.
    fn candidates(setup: &Setup<'_, O, Self::Place>) -> Result<Vec<Algorithm<O>>> {
        Self::algorithms(setup)
    }

    /// The configurations of an algorithm that a search tries. The first one has the cost model's parameters.
    fn variants(_: &Setup<'_, O, Self::Place>, algorithm: Algorithm<O>) -> Vec<O::Configuration> {
        vec![O::Configuration::of(algorithm)]
    }

    /// The configuration with the parameters filled in that a plan would choose for those that are `None`.
    fn complete(
        setup: &Setup<'_, O, Self::Place>,
        configuration: &O::Configuration,
    ) -> Result<O::Configuration> {
        Ok(Self::new(setup, configuration)?.configuration())
    }

    /// The run time that the cost model predicts. The unit depends on the engine, so only costs of the same engine can
    /// be compared.
    fn cost(_: &Setup<'_, O, Self::Place>, _: &O::Configuration) -> Result<f64> {
        Ok(1.0)
    }
}

/// An operator whose runs are measured on random tensors, and whose results can be compared in part.
pub trait Measured: Operator {
    /// The data that all measured runs share in addition to their tensors, for example packed filters.
    type SearchData: Default;

    /// The descriptor of the output.
    fn y(spec: &Self::Spec) -> &TensorDesc;

    /// The range of the numbers with which an input is filled.
    fn range(input: &'static str) -> (f64, f64);

    /// Prepares the data that runs of a plan share.
    fn prepare(
        _: &PlanInputs<'_, Self>,
        _: &mut Self::SearchData,
        _: &mut Workspace,
    ) -> Result<()> {
        Ok(())
    }

    /// Runs a plan. A state that it could write is not asked for.
    fn run(
        bound: &PlanInputs<'_, Self>,
        kept: &Self::SearchData,
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()>;

    /// The comparison of a run's `y` with the oracle.
    fn compare(plan: &Plan<Self>, args: &Self::Args<'_>, y: &TensorRef<'_>) -> Result<Comparison>;

    /// The comparison of the first `count` and the last `count` slices of `y` with the oracle (see
    /// [`Plan::compare_ends`]). `None` means as many slices as a search compares.
    fn compare_ends(
        plan: &Plan<Self>,
        args: &Self::Args<'_>,
        y: &TensorRef<'_>,
        count: Option<usize>,
    ) -> Result<Comparison>;
}

/// An operator whose configurations are searched.
pub trait Tuned: Measured {
    /// The spec that a search measures in place of `spec`. Its tensors are dense, and a convolution's may have fewer
    /// images on the CPU.
    fn plain(spec: &Self::Spec, options: &PlanOptions) -> Result<Self::Spec>;

    /// The key of a [`plain`](Self::plain) spec in the tuning tables: its types, sizes and options as text, and on the
    /// CPU the number of threads.
    fn key(spec: &Self::Spec, options: &PlanOptions) -> String;

    /// False if there is nothing to choose on this device.
    fn has_choice(_: Device) -> bool {
        true
    }
}
