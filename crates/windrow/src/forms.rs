//! Macros for public types: names of values (`names!`), options set one by one (`setters!`), and both the options and
//! their structure (`fields!`).

/// Declares the names of an enum's values, and other words that are read as one: `ALL`, `name`, `Display`, and
/// `FromStr`, whose error says which argument it was and lists the names.
macro_rules! names {
    ($type:ident, $argument:literal: $($variant:ident $(($inner:path))? = $name:literal $(| $other:literal)*),* $(,)?) => {
        impl $type {
            /// All values.
            pub const ALL: &'static [Self] = &[$($type::$variant $(($inner))?),*];

            /// The name in configurations, in reports and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant $(($inner))? => $name,)*
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::Error;

            fn from_str(s: &str) -> $crate::Result<Self> {
                match s {
                    $($name $(| $other)* => Ok($type::$variant $(($inner))?),)*
                    _ => Err($crate::Error::parameter($argument, s, [$($name),*].join(", "))),
                }
            }
        }
    };
}

pub(crate) use names;

/// Methods that set one field and give the structure back; those behind a `?` take a value or an `Option`. So a field
/// can be added without a change of what users wrote.
macro_rules! setters {
    ($type:ident $(<$life:lifetime>)? {
        $($method:ident($field:ident: $value:ty);)*
        $(? $optional:ident($given:ident: $inner:ty);)*
    }) => {
        impl $(<$life>)? $type $(<$life>)? {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $method(mut self, $field: $value) -> Self {
                    self.$field = $field;
                    self
                }
            )*
            $(
                #[doc = concat!("Sets [`", stringify!($given), "`](Self::", stringify!($given), "); `None` removes it.")]
                #[must_use]
                pub fn $optional(mut self, $given: impl Into<Option<$inner>>) -> Self {
                    self.$given = $given.into();
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;

/// Declares a structure of public fields: those that its constructor takes, those with a default, and those that are
/// `None` at first. A method named behind `=>` sets its field and gives the structure back.
macro_rules! fields {
    (
        $(#[$about:meta])*
        $name:ident $(<$life:lifetime>)? by $vis:vis fn $new:ident {
            $($(#[$doc:meta])* $field:ident: $type:ty $(=> $set:ident)?,)*
        }
        $(default {
            $($(#[$doc_given:meta])* $given:ident: $of_given:ty = $value:expr => $set_given:ident,)*
        })?
        optional {
            $($(#[$doc_optional:meta])* $optional:ident: $inner:ty => $set_optional:ident,)*
        }
    ) => {
        $(#[$about])*
        #[non_exhaustive]
        pub struct $name $(<$life>)? {
            $($(#[$doc])* pub $field: $type,)*
            $($($(#[$doc_given])* pub $given: $of_given,)*)?
            $($(#[$doc_optional])* pub $optional: Option<$inner>,)*
        }

        impl $(<$life>)? $name $(<$life>)? {
            /// The fields that it takes, without options.
            $vis fn $new($($field: $type),*) -> Self {
                $name { $($field,)* $($($given: $value,)*)? $($optional: None,)* }
            }
        }

        $crate::forms::setters! {
            $name $(<$life>)? {
                $($($set($field: $type);)?)*
                $($($set_given($given: $of_given);)*)?
                $(? $set_optional($optional: $inner);)*
            }
        }
    };
}

pub(crate) use fields;
